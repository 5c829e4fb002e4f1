"""Objects of a run: Arrow IPC files whose checksum covers every byte and is checked before Arrow parses any.

The checksum lives inside the bytes it covers. The schema metadata holds `everstep:crc32c:00000000`; Arrow writes the
schema twice, in the first message and in the footer. CRC32C over the whole file in that form gives the eight digits
that then replace both `00000000`. A reader locates the two places from the lengths at the head and the tail, without
Arrow, and recomputes. This rule and the key `everstep`, whose value is the format, are the same in every format; the
rest of an object may change with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

import google_crc32c
import pyarrow as pa

from everstep.core.errors import CorruptObject, FormatTooNew
from everstep.storage.store import Buffer

FORMAT_VERSION = 2  # 2 packs places and quantised values in records; 1 is read

_MARK = b"everstep:crc32c:"
_ZERO = b"00000000"
_MAGIC = b"everstep"
_FIELD = b"everstep."  # + the name of a field of Header
_EXTRA = b"everstep.extra."
_ARROW = b"ARROW1"
_HEAD = len(_ARROW) + 2 + 8  # magic, padding, continuation mark, length of the schema message
_TAIL = 4 + len(_ARROW)  # length of the footer, magic


@dataclass(frozen=True)
class Header:
    """What an object says about itself.

    Args:
        kind: "segment", "base" or "compressor".
        run: name of the run that wrote it.
        generation: the writer's generation.
        shard: shard, or slice of a compressor snapshot.
        first: lowest lsn inside; for a state, its lsn.
        last: highest lsn inside; for a state, its lsn.
        parent: checksum of the object before this one in the same shard; "" if not known.
        format: version of the layout.
        extra: whatever else the writer wants to find again.
    """

    kind: str
    run: str
    generation: int
    shard: int
    first: int
    last: int
    parent: str = ""
    format: int = FORMAT_VERSION
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredObject:
    """A verified object; `batches` point into the bytes it was decoded from. `size` in bytes."""

    header: Header
    batches: list[pa.RecordBatch]
    crc: str
    size: int


def encode(header: Header, batches: Sequence[pa.RecordBatch]) -> pa.Buffer:
    """Return the object's bytes; the batches share one schema, whose own metadata is kept.

    Raises:
        ValueError: the schemas differ, or a name or metadata in them contains the checksum's mark.
    """
    schema = batches[0].schema if batches else pa.schema([])
    if any(not batch.schema.equals(schema) for batch in batches):
        raise ValueError("the batches of one object must share one schema")
    own = {_MAGIC: str(header.format).encode(), _FIELD + b"crc32c": _MARK + _ZERO}
    own |= {_FIELD + name.encode(): str(getattr(header, name)).encode() for name in (*_TEXTS, *_INTEGERS)}
    own |= {_EXTRA + name.encode(): value.encode() for name, value in header.extra.items()}
    kept = {k: v for k, v in (schema.metadata or {}).items() if k != _MAGIC and not k.startswith(_FIELD)}
    schema = schema.with_metadata(kept | own)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    data = sink.getvalue()
    places = _places(data)
    if places is None or any(data.slice(place, 8).to_pybytes() != _ZERO for place in places):
        raise ValueError(f"names or metadata of the batches contain {_MARK.decode()!r}, which is everstep's own")
    digits = _checksum(data, places).encode()
    view = memoryview(data).cast("B")
    for place in places:
        view[place : place + 8] = digits
    return data


def decode(data: Buffer, *, where: str, expect: Mapping[str, object] | None = None) -> StoredObject:
    """Verify and open an object; the batches are views of `data`, nothing is copied.

    Args:
        data: the object's bytes.
        where: its name, for messages.
        expect: header fields that must have these values, such as those its name states.

    Raises:
        CorruptObject: checksum, truncation, not an object of everstep, or a header that differs from `expect`.
        FormatTooNew: intact, but written by a later everstep.
    """
    buffer = pa.py_buffer(data)
    crc = _verify(buffer, where)
    try:
        reader = pa.ipc.open_file(pa.BufferReader(buffer))
        metadata = dict(reader.schema.metadata or {})
        written = int(metadata.get(_MAGIC, b""))
    except (pa.ArrowException, ValueError, OSError) as error:
        _corrupt(where, f"its checksum is right but it is no object of everstep ({error})")
    if written > FORMAT_VERSION:
        raise FormatTooNew(
            f"object {where} has format {written}; this everstep reads up to {FORMAT_VERSION}",
            hint="upgrade everstep to read this run",
        )
    try:
        header = _header(metadata, written)
        batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
    except (pa.ArrowException, ValueError, KeyError, OSError) as error:
        _corrupt(where, f"its checksum is right but its content cannot be read ({error!r})")
    for name, wanted in (expect or {}).items():
        if (got := getattr(header, name)) != wanted:
            _corrupt(where, f"its header does not fit its name: {name} expected {wanted!r}, got {got!r}")
    return StoredObject(header, batches, crc, buffer.size)


def crc_of(data: Buffer) -> str:
    """Return the checksum that an encoded object carries, unverified; "" if it carries none."""
    buffer = pa.py_buffer(data)
    places = _places(buffer)
    return buffer.slice(places[0], 8).to_pybytes().decode("latin-1") if places else ""


_INTEGERS = ("generation", "shard", "first", "last")
_TEXTS = ("kind", "run", "parent")
assert {*_INTEGERS, *_TEXTS, "format", "extra"} == {entry.name for entry in fields(Header)}


def _header(metadata: Mapping[bytes, bytes], written: int) -> Header:
    values: dict[str, Any] = {name: int(metadata[_FIELD + name.encode()]) for name in _INTEGERS}
    values |= {name: metadata[_FIELD + name.encode()].decode() for name in _TEXTS}
    extra = {k.removeprefix(_EXTRA).decode(): v.decode() for k, v in metadata.items() if k.startswith(_EXTRA)}
    return Header(**values, format=written, extra=extra)


def _verify(buffer: pa.Buffer, where: str) -> str:
    """Return the checksum after comparing both copies of it with the bytes."""
    places = _places(buffer)
    if places is None:
        _corrupt(where, f"expected an Arrow file with everstep's checksum in it, got {buffer.size} bytes without")
    found = [buffer.slice(place, 8).to_pybytes() for place in places]
    crc = _checksum(buffer, places)
    if any(digits != crc.encode() for digits in found):
        seen = " and ".join(sorted({digits.decode("latin-1") for digits in found}))
        _corrupt(where, f"its {buffer.size} bytes have checksum {crc}, but it says {seen!a}")
    return crc


def _places(buffer: pa.Buffer) -> tuple[int, int] | None:
    """Return where the digits stand in the schema message and in the footer, by Arrow's lengths alone."""
    size = buffer.size
    if size < _HEAD + _TAIL:
        return None
    head = buffer.slice(0, _HEAD).to_pybytes()
    tail = buffer.slice(size - _TAIL).to_pybytes()
    schema = int.from_bytes(head[-4:], "little")
    footer = int.from_bytes(tail[:4], "little")
    start = size - _TAIL - footer
    if not head.startswith(_ARROW) or not tail.endswith(_ARROW) or start < _HEAD + schema:
        return None
    first = buffer.slice(_HEAD, schema).to_pybytes().find(_MARK)
    last = buffer.slice(start, footer).to_pybytes().find(_MARK)
    places = _HEAD + first + len(_MARK), start + last + len(_MARK)
    if first < 0 or last < 0 or places[0] + 8 > _HEAD + schema or places[1] + 8 > size - _TAIL:
        return None
    return places


def _checksum(buffer: pa.Buffer, places: tuple[int, int]) -> str:
    """CRC32C of the bytes as if both places held zeros."""
    # The C function takes read-only buffers; this view of the same memory is one, whatever `buffer` is.
    view = pa.foreign_buffer(buffer.address, buffer.size, base=buffer)
    crc, done = 0, 0
    for place in places:
        crc = google_crc32c.extend(crc, view.slice(done, place - done))
        crc = google_crc32c.extend(crc, _ZERO)
        done = place + 8
    return f"{google_crc32c.extend(crc, view.slice(done)):08x}"


def _corrupt(where: str, what: str) -> NoReturn:
    raise CorruptObject(
        f"object {where} is damaged: {what}",
        hint="everstep chain verify RUN lists what is whole; an older round or another step can still be restored",
    )
