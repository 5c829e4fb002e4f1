"""Manifests round trip; damage and a later format are told apart."""

from __future__ import annotations

import json

import pytest

from everstep.core.errors import CorruptObject, FormatTooNew
from everstep.storage import checked
from everstep.storage.manifest import FORMAT, CompressorSnapshot, Manifest, Span

MANIFEST = Manifest(
    version=4,
    run="r",
    generation=2,
    state="open",
    lineage=(Span(1, 0, 1, 7), Span(2, 0, 8, None)),
    settings={"run": {"name": "r", "lr": 1e-3, "tags": ["ä", None]}},
    exactness="bitwise",
    compressor=(CompressorSnapshot(1, 5, 2),),
    closing={"last_lsn": 9},
    writer="w",
    created=12.25,
)


def test_round_trip_and_stable_text() -> None:
    data = MANIFEST.to_json()
    assert Manifest.from_json(data) == MANIFEST
    assert Manifest.from_json(data).to_json() == data
    assert list(json.loads(data))[:3] == ["version", "run", "generation"]
    assert list(json.loads(data))[-1] == "crc32c"
    assert data.count(b"\n") > 20


def test_damage_is_seen_or_changes_nothing() -> None:
    data = MANIFEST.to_json()
    for place in range(len(data)):
        bad = bytearray(data)
        bad[place] ^= 1
        try:
            assert Manifest.from_json(bytes(bad)) == MANIFEST, place
        except CorruptObject as error:
            assert error.hint
    for size in range(len(data) - 2):
        with pytest.raises(CorruptObject):
            Manifest.from_json(data[:size])


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"3", b"\xff", b'{"crc32c": "0"}'])
def test_rubbish(data: bytes) -> None:
    with pytest.raises(CorruptObject, match="manifest/x"):
        Manifest.from_json(data, where="manifest/x")


def test_a_later_format() -> None:
    later = Manifest(1, "r", 1, "open", (), {}, "bitwise", format=FORMAT + 1)
    with pytest.raises(FormatTooNew, match=f"format {FORMAT + 1}.*up to {FORMAT}"):
        Manifest.from_json(later.to_json())


def test_missing_fields() -> None:
    data = checked.dump({"format": FORMAT, "lineage": [], "compressor": []})
    with pytest.raises(CorruptObject, match="fields"):
        Manifest.from_json(data)
