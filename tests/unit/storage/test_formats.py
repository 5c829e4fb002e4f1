"""The pages of `docs/formats` and the code say the same; a reader written from the pages reads what everstep wrote."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from everstep.compressors import Spec, build_compressor
from everstep.storage import encrypted, events
from everstep.storage.chain import Chain
from everstep.storage.keys import (
    BaseKey,
    CompressorKey,
    EventKey,
    ManifestKey,
    PinKey,
    SegmentKey,
    facts,
    parse,
)
from everstep.storage.manifest import FORMAT, Base, CompressorSnapshot, Kept, Manifest, Origin, Span
from everstep.storage.memory import MemoryStore
from everstep.storage.objects import FORMAT_VERSION, Header, decode, encode
from everstep.storage.pins import Pin
from everstep.training.delta import Delta
from everstep.training.layout import plan_layout
from everstep.training.record import (
    DELTA_SCHEMA,
    STEP_SCHEMA,
    StepResult,
    pack,
    read_delta,
    rows,
    schema_of,
    unpack,
)  # fmt: skip
from everstep.training.shard_state import BASE_SCHEMA, from_batches, to_batches
from tests.faults.history import History, recipe
from tests.golden import plain_reader
from tests.golden.make_golden import SECRET, key_loaded

PAGES = Path(__file__).parents[3] / "docs" / "formats"
RUN = "written"


def tables(page: str) -> dict[str, list[list[str]]]:
    """The rows of a page's tables below each heading, without the head and with the back quotes taken off."""
    out: dict[str, list[list[str]]] = {}
    heading, rule = "", False
    for line in (PAGES / f"{page}.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading, rule = line.lstrip("# "), False
        elif line.startswith("| ---"):
            rule = True
        elif line.startswith("| ") and rule:
            cells = [cell.strip().strip("`") for cell in line.strip("|").split(" | ")]
            out.setdefault(heading, []).append(cells)
    return out


class Written:
    """A run that this version wrote, plain or encrypted, as names and bytes."""

    def __init__(self, key_id: str) -> None:
        self.store = MemoryStore()
        made = History(self.store, RUN, recipe(), key_id=key_id)
        made.round()
        made.advance(4, 2)
        made.snapshot()
        made.round()
        made.take_over()
        made.advance(3, 2)
        made.evaluate()
        made.close()
        self.chain: Chain = made.chain
        self.digests = made.digests
        self.objects = {info.key: bytes(self.store.get(info.key)) for info in self.store.list(f"{RUN}/")}

    def plain(self, name: str) -> bytes:
        data = self.objects[name]
        return plain_reader.unseal(SECRET, name, data) if data.startswith(b"EVERSTEP-AEAD") else data

    def keys(self, *kinds: Any) -> list[tuple[str, Any]]:
        found = [(name, parse(name.removeprefix(f"{RUN}/"))) for name in self.objects]
        return [(name, key) for name, key in found if isinstance(key, kinds)]


@pytest.fixture(scope="module", params=["plain", "encrypted"])
def written(request: pytest.FixtureRequest) -> Iterator[Written]:
    with key_loaded() as key_id:
        yield Written(key_id if request.param == "encrypted" else "")


# --- the pages against the code


@pytest.mark.parametrize(
    ("page", "heading", "schema"),
    [
        ("record", "STEP_SCHEMA (shard 0)", STEP_SCHEMA),
        ("record", "DELTA_SCHEMA (shards 1 and up)", DELTA_SCHEMA),
        ("base", "BASE_SCHEMA", BASE_SCHEMA),
    ],
)
def test_schemas_are_those_of_the_pages(page: str, heading: str, schema: pa.Schema) -> None:
    assert [(name, kind) for name, kind, *_ in tables(page)[heading]] == [(f.name, str(f.type)) for f in schema]


@pytest.mark.parametrize(
    ("page", "heading", "kind", "more"),
    [
        ("manifest", "Manifest", Manifest, ["crc32c"]),
        ("manifest", "span", Span, []),
        ("manifest", "snapshot", CompressorSnapshot, []),
        ("manifest", "base", Base, []),
        ("manifest", "kept", Kept, []),
        ("manifest", "origin", Origin, []),
        ("pin", "Pin", Pin, ["crc32c"]),
    ],
)
def test_fields_are_those_of_the_pages(page: str, heading: str, kind: Any, more: list[str]) -> None:
    assert [row[0] for row in tables(page)[heading]] == [field.name for field in fields(kind)] + more


def test_formats_are_those_of_the_pages() -> None:
    assert f"objects have format {FORMAT_VERSION} " in (PAGES / "README.md").read_text(encoding="utf-8")
    assert f"manifests format {FORMAT} " in (PAGES / "README.md").read_text(encoding="utf-8")
    assert dict((row[0], row[2]) for row in tables("manifest")["Manifest"])["format"] == str(FORMAT)
    assert (
        encrypted.FRAME == plain_reader.FRAME and str(encrypted.FRAME) in tables("encrypted")["Encrypted object"][3][1]
    )


def test_the_header_is_that_of_the_page() -> None:
    data = encode(Header("segment", "r", 1, 0, 1, 1, extra={"NAME": "x"}), [])
    metadata = pa.ipc.open_file(pa.BufferReader(data)).schema.metadata
    assert {row[0] for row in tables("object")["Header"]} == {key.decode() for key in metadata}


def test_names_are_those_of_the_page() -> None:
    keys = {
        "manifest": ManifestKey(7), "segment": SegmentKey(2, 3, 11, 12), "base": BaseKey(2, 3, 12, "x1"),
        "compressor": CompressorKey(2, 12, 1), "event": EventKey("an-event"), "pin": PinKey("x2"),
    }  # fmt: skip
    rows = {row[0]: row[1] for row in tables("names")["Names"]}
    assert set(rows) == set(keys)
    for kind, key in keys.items():
        values = {"run": "r"} | {field.name: getattr(key, field.name) for field in fields(key) if field.name != "run"}
        form = re.sub(r"<([a-z]+)(:0[0-9]+d)?>", r"{\1\2}", rows[kind])
        assert form.format(**values) == f"r/{key.path}"


def test_the_example_is_a_real_object() -> None:
    data = (PAGES / "example.arrow").read_bytes()
    text = (PAGES / "object.md").read_text(encoding="utf-8")
    lines = re.findall(r"^([0-9a-f]{8}): ((?:[0-9a-f]{4} ?)+) ", text, re.MULTILINE)
    assert len(lines) > 10
    for offset, digits in lines:
        start = int(offset, 16)
        assert data[start : start + 16] == bytes.fromhex(digits), offset
    stored = decode(data, where="example")
    assert stored.header == Header("base", "r", 1, 1, 3, 3, format=1)  # a base is the same in format 2
    tensors = from_batches(stored.batches)
    assert list(tensors) == ["param/w"] and torch.equal(tensors["param/w"], torch.tensor([1.0, -2.0]))
    assert plain_reader.checked(data) == stored.crc and stored.crc in text and f"{len(data)} bytes" in text


def test_the_reader_knows_nothing_of_everstep() -> None:
    tree = ast.parse(Path(plain_reader.__file__).read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {"pyarrow", "json", "struct"} <= names and not any(name.startswith(("everstep", "tests")) for name in names)


# --- the reader against what everstep wrote


def test_every_object_is_read_from_the_pages(written: Written) -> None:
    found = written.keys(SegmentKey, BaseKey, CompressorKey)
    assert {type(key) for _, key in found} == {SegmentKey, BaseKey, CompressorKey}
    for name, key in found:
        got, own = plain_reader.read_object(written.plain(name)), written.chain.read(key)
        stated = {"run": RUN, **facts(key)}
        assert {field: got.header[f"everstep.{field}"] for field in stated} == {k: str(v) for k, v in stated.items()}
        assert (got.crc, got.header["everstep.parent"]) == (own.crc, own.header.parent)
        assert [batch.to_pydict() for batch in got.batches] == [batch.to_pydict() for batch in own.batches]


def test_segments_are_as_their_pages_say(written: Written) -> None:
    ends: dict[tuple[int, int], str] = {}
    for name, key in sorted(written.keys(SegmentKey)):
        got = plain_reader.read_object(written.plain(name))
        assert all(batch.schema.equals(schema_of(key.shard)) for batch in got.batches)
        nullable = {"places", "count", "values", "codes", "scales", "bits", "skip", "clip", "digest"}
        for lsn, row in plain_reader.read_records(got).items():
            assert {column for column, value in row.items() if value is None} <= nullable
            assert row["lsn"] == lsn and isinstance(json.loads(row["hyper"]), list)
        assert got.header["everstep.parent"] == ends.get((key.generation, key.shard), "")
        ends[key.generation, key.shard] = got.crc


def test_deltas_are_read_from_the_pages(written: Written) -> None:
    for name, key in written.keys(SegmentKey):
        stored = plain_reader.read_object(written.plain(name)).batches if key.shard else []
        for batch in (record for several in stored for record in rows(several)):
            (row,), own = batch.to_pylist(), read_delta(batch)
            assert own is not None and own.indices is not None
            assert plain_reader.places(row["places"], row["count"]) == own.indices.tolist()
            assert plain_reader.values(row).tobytes() == own.values.tobytes()


@pytest.mark.parametrize("method", ["int8", "int4", "topk+int8"])
def test_codes_are_read_from_the_pages(method: str) -> None:
    compressor = build_compressor(method, Spec(0.3))
    assert compressor is not None
    layout = plan_layout(["a", "b"], [torch.empty(451), torch.empty(700)], [0, 0], 2)
    sent = compressor.compress(torch.randn(layout.size, generator=torch.Generator().manual_seed(1)), 1)
    places = None if sent.indices is None else sent.indices.numpy()
    delta = Delta(sent.values.numpy(), places, frozenset(), sent.codes, 0.3)
    for shard in (1, 2):
        batch = unpack(shard, pack(StepResult(1, 1, delta, {}, [], {}, {}), layout, shard))
        (row,), own, part = batch.to_pylist(), read_delta(batch), delta.part(layout.range_of(shard))
        assert (
            own is not None
            and own.values.tobytes() == plain_reader.values(row).tobytes() == part.consumed().values.tobytes()
        )
        assert (row["places"] is None) == (places is None)
        if part.indices is not None:
            assert plain_reader.places(row["places"], row["count"]) == part.indices.tolist()


def test_bases_have_the_digest_that_their_record_logged(written: Written) -> None:
    logged: dict[tuple[int, int], str] = {}
    for name, key in written.keys(SegmentKey):
        for lsn, row in plain_reader.read_records(plain_reader.read_object(written.plain(name))).items():
            logged[key.shard, lsn] = row["digest"]
    states: dict[int, dict[str, plain_reader.Tensor]] = {}
    for name, key in written.keys(BaseKey):
        got = plain_reader.read_object(written.plain(name))
        tensors = plain_reader.read_tensors(got)
        again = to_batches(from_batches(decode(written.plain(name), where=name).batches))
        assert {row["name"]: row["data"] for batch in again for row in batch.to_pylist()} == {
            tensor: found.data for tensor, found in tensors.items()
        }
        assert list(tensors) == sorted(tensors)
        if key.lsn:
            assert plain_reader.digest(tensors) == logged[key.shard, key.lsn]
        states.setdefault(key.lsn, {}).update(tensors)
    assert {lsn: plain_reader.digest(state) for lsn, state in states.items()} == {
        lsn: written.digests[lsn] for lsn in (0, 4)
    }


def test_the_residual_is_as_its_page_says(written: Written) -> None:
    (snapshot,) = written.chain.manifest.compressor
    sizes = 0
    for number in range(snapshot.slices):
        name = f"{RUN}/{CompressorKey(snapshot.generation, snapshot.lsn, number).path}"
        tensors = plain_reader.read_tensors(plain_reader.read_object(written.plain(name)))
        assert list(tensors) == ["residual"] and tensors["residual"].dtype == "float32"
        sizes += tensors["residual"].array().size
    assert sizes == sum(len(row) for row in _dense_sizes(written))


def _dense_sizes(written: Written) -> Iterator[bytes]:
    """A byte for each element of each trainable parameter, as the bases at 0 have them."""
    for name, key in written.keys(BaseKey):
        if key.lsn == 0 and key.shard:
            for tensor in plain_reader.read_tensors(plain_reader.read_object(written.plain(name))).values():
                size = 1
                for extent in tensor.shape:
                    size *= extent
                yield bytes(size)


def test_manifests_are_read_from_the_page(written: Written) -> None:
    rows = [row[0] for row in tables("manifest")["Manifest"]]
    states = []
    for name, key in sorted(written.keys(ManifestKey)):
        assert list(json.loads(written.objects[name])) == rows
        got, own = plain_reader.read_json(written.objects[name]), Manifest.from_json(written.objects[name])
        assert (got["version"], got["run"], got["format"]) == (key.version, RUN, FORMAT)
        assert json.loads(own.to_json())["lineage"] == got["lineage"] and len(own.bases) == len(got["bases"])
        states.append(got["state"])
    assert states == ["open", "open", "open", "open", "claim", "open", "closed"]
    closing = plain_reader.read_json(written.objects[name])["closing"]
    assert list(closing) == [row[0] for row in tables("manifest")["closing"]]
    for shard, crc in closing["tails"].items():
        tail = f"{RUN}/{SegmentKey(2, int(shard), 7, 7).path}"
        assert plain_reader.checked(written.plain(tail)) == crc
    for base in got["bases"]:
        key = BaseKey(base["generation"], base["shard"], base["lsn"], base["id"])
        data = written.plain(f"{RUN}/{key.path}")
        assert (plain_reader.checked(data), len(data)) == (base["crc32c"], base["size"])


def test_events_are_read_from_the_page(written: Written) -> None:
    (name,) = [name for name, _ in written.keys(EventKey)]
    stored = json.loads(written.plain(name))
    assert list(stored) == [row[0] for row in tables("event")["Event"]]
    assert [plain_reader.read_json(written.plain(name))["body"]] == list(
        events.read_all(written.chain.store, RUN).values()
    )


def test_a_long_and_an_empty_object_are_unsealed_from_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    key = encrypted.Key(SECRET)
    for module in (encrypted, plain_reader):
        monkeypatch.setattr(module, "FRAME", 10)
    for size in (0, 1, 10, 11, 20, 35):
        data = bytes(range(size))
        assert plain_reader.unseal(SECRET, "r/x", bytes(encrypted.seal(key, "r/x", data))) == data
