"""Names round trip, and nothing else parses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.storage.keys import (
    BaseKey,
    CompressorKey,
    EventKey,
    Key,
    ManifestKey,
    PinKey,
    SegmentKey,
    facts,
    generation_of,
    parse,
)

count = st.integers(1, 10**14)
index = st.integers(0, 10**14)
name = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.@:=+,-]{0,30}", fullmatch=True)
spans = st.tuples(count, index).map(lambda pair: (pair[0], sum(pair)))
keys = st.one_of(
    st.builds(ManifestKey, count),
    st.tuples(count, index, spans).map(lambda t: SegmentKey(t[0], t[1], *t[2])),
    st.builds(BaseKey, count, index, index, name),
    st.builds(CompressorKey, count, index, index),
    st.builds(EventKey, name),
    st.builds(PinKey, name),
)


@given(keys)
def test_round_trip(key: Key) -> None:
    assert parse(key.path) == key
    assert generation_of(key.path) == getattr(key, "generation", None)


@given(st.one_of(st.text(), keys.flatmap(lambda key: st.text(max_size=2).map(lambda more: key.path + more))))
def test_what_parses_has_that_path(path: str) -> None:
    key = parse(path)
    assert key is None or key.path == path


def test_layout() -> None:
    assert ManifestKey(7).path == "manifest/00000000000000000007.json"
    assert SegmentKey(1, 2, 3, 40).path == "g000001/log/s0002/000000000003-000000000040.arrow"
    assert BaseKey(1, 2, 3, "ab12").path == "g000001/base/s0002/000000000003-ab12.arrow"
    assert CompressorKey(1, 3, 2).path == "g000001/comp/000000000003/r0002.arrow"
    assert PinKey("x").path == "pins/x.json"
    assert EventKey("kill_worker@40:rank=1").path == "events/kill_worker@40:rank=1.json"
    assert facts(CompressorKey(1, 3, 2)) == {"kind": "compressor", "generation": 1, "shard": 2, "first": 3, "last": 3}


@pytest.mark.parametrize(
    "path",
    [
        "manifest/7.json",
        "manifest/00000000000000000000.json",
        "manifest/00000000000000000007.json.bak",
        "g000001/log/s0002/000000000005-000000000004.arrow",
        "g000000/log/s0002/000000000001-000000000004.arrow",
        "g0000001/log/s0002/000000000001-000000000004.arrow",
        "g000001/base/s0002/000000000003-.arrow",
        "pins/.hidden.json",
        "notes.txt",
    ],
)
def test_strays(path: str) -> None:
    assert parse(path) is None


def test_impossible_names_are_refused() -> None:
    for build in (lambda: SegmentKey(1, 0, 0, 3), lambda: EventKey("a/b"), lambda: EventKey("")):
        with pytest.raises(ValueError, match="not the name"):
            build()
