"""Objects: what was encoded comes back, and any damage is seen before Arrow reads a byte."""

from __future__ import annotations

import random
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core.errors import CorruptObject, FormatTooNew
from everstep.storage import objects
from everstep.storage.objects import FORMAT_VERSION, Header, crc_of, decode, encode

HEADER = Header("segment", "a run", 3, 2, 10, 12, parent="0123abcd", extra={"codec": "topk", "ü": "ö"})


def batch(rows: int = 3, metadata: dict[str, str] | None = None) -> pa.RecordBatch:
    columns = {
        "lsn": pa.array(range(rows), pa.int64()),
        "delta": pa.array([b"\x01\xff" * 20] * rows, pa.large_binary()),
    }
    made = pa.record_batch(columns)
    return made.replace_schema_metadata(metadata) if metadata else made


GOOD = bytes(encode(HEADER, [batch(), batch(1)]))


def test_round_trip() -> None:
    batches = [batch(3, {"mine": "kept"}), batch(2, {"mine": "kept"})]
    data = encode(HEADER, batches)
    got = decode(data, where="x", expect={"run": "a run", "first": 10})
    assert got.header == HEADER
    assert [found.to_pydict() for found in got.batches] == [made.to_pydict() for made in batches]
    assert got.batches[0].schema.metadata[b"mine"] == b"kept"
    assert (got.crc, got.size) == (crc_of(data), data.size)


def test_any_reader_of_arrow_can_read_it() -> None:
    assert pa.ipc.open_file(pa.BufferReader(GOOD)).read_all().num_rows == 4


def test_no_batches() -> None:
    assert decode(encode(HEADER, []), where="x").batches == []


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, pa.py_buffer])
def test_nothing_is_copied(kind: type) -> None:
    data = kind(bytes(encode(HEADER, [batch()])))
    start = pa.py_buffer(data).address
    for buffer in decode(data, where="x").batches[0].column(1).buffers():
        assert buffer is None or start <= buffer.address < start + len(memoryview(data))


def test_same_input_same_bytes_and_reencoding_drops_the_old_header() -> None:
    assert bytes(encode(HEADER, [batch(), batch(1)])) == GOOD
    read = decode(GOOD, where="x").batches
    again = decode(encode(Header("base", "b", 1, 0, 5, 5), read), where="x")
    assert again.header == Header("base", "b", 1, 0, 5, 5)


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_any_flipped_byte_is_seen(place: int, change: int) -> None:
    bad = bytearray(GOOD)
    bad[place] ^= change
    with mock.patch.object(pa.ipc, "open_file", side_effect=AssertionError("Arrow must not see damaged bytes")):
        with pytest.raises(CorruptObject, match="run/object") as caught:
            decode(bad, where="run/object")
    assert caught.value.hint


def test_every_single_bit_is_covered() -> None:
    small = bytes(encode(Header("base", "r", 1, 0, 0, 0), [batch(1)]))
    for place in range(len(small)):
        for bit in range(8):
            bad = bytearray(small)
            bad[place] ^= 1 << bit
            with pytest.raises(CorruptObject):
                decode(bad, where="x")


@given(st.integers(0, len(GOOD) - 1))
def test_any_truncation_is_seen(size: int) -> None:
    for bad in (GOOD[:size], GOOD[len(GOOD) - size :], GOOD + GOOD[:size] if size else b""):
        with pytest.raises(CorruptObject):
            decode(bad, where="x")


@given(st.binary(max_size=300))
def test_rubbish_is_seen(data: bytes) -> None:
    for bad in (data, b"ARROW1\0\0" + data + b"ARROW1", GOOD[:40] + data + GOOD[-40:]):
        with pytest.raises(CorruptObject):
            decode(bad, where="x")


def test_swapped_pieces_are_seen() -> None:
    shuffled = list(range(len(GOOD) // 8))
    random.Random(5).shuffle(shuffled)
    with pytest.raises(CorruptObject):
        decode(b"".join(GOOD[8 * i : 8 * i + 8] for i in shuffled), where="x")


def test_a_plain_arrow_file_is_not_ours() -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch().schema) as writer:
        writer.write_batch(batch())
    with pytest.raises(CorruptObject, match="checksum"):
        decode(sink.getvalue(), where="x")


def test_header_must_fit_the_name() -> None:
    with pytest.raises(CorruptObject, match="shard expected 5, got 2"):
        decode(GOOD, where="x", expect={"run": "a run", "shard": 5})


def test_a_later_format_is_told_apart_from_damage() -> None:
    later = encode(Header("segment", "r", 1, 0, 1, 1, format=FORMAT_VERSION + 4), [batch()])
    with pytest.raises(FormatTooNew, match=f"format {FORMAT_VERSION + 4}.*up to {FORMAT_VERSION}") as caught:
        decode(later, where="x")
    assert "upgrade" in caught.value.hint
    bad = bytearray(later)
    bad[len(bad) // 2] ^= 1
    with pytest.raises(CorruptObject):
        decode(bad, where="x")


def test_a_later_format_may_lack_our_fields() -> None:
    real = objects._TEXTS
    with mock.patch.object(objects, "_TEXTS", ()), mock.patch.object(objects, "_INTEGERS", ()):
        later = encode(Header("segment", "r", 1, 0, 1, 1, format=FORMAT_VERSION + 1), [batch()])
        unfit = encode(Header("segment", "r", 1, 0, 1, 1), [batch()])
    assert real == objects._TEXTS
    with pytest.raises(FormatTooNew):
        decode(later, where="x")
    with pytest.raises(CorruptObject, match="cannot be read"):
        decode(unfit, where="x")


def test_the_mark_in_data_does_no_harm_and_in_names_still_decodes_or_is_refused() -> None:
    mark = "everstep:crc32c:"
    data = encode(HEADER, [pa.record_batch({"text": [mark + "00000000", mark]})])
    assert decode(data, where="x").batches[0].num_rows == 2
    for name in (mark, mark + "00000000", mark + "zz"):
        for made in (pa.record_batch({name: [1]}), batch(1, {"note": name}), batch(1, {name: "note"})):
            try:
                data = encode(HEADER, [made])
            except ValueError:
                continue
            assert decode(data, where="x").header == HEADER


def test_one_schema_an_object() -> None:
    with pytest.raises(ValueError, match="one schema"):
        encode(HEADER, [batch(), pa.record_batch({"other": [1]})])
