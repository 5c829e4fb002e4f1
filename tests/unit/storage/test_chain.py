"""The chain: tenure, lost answers, lost races, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from everstep.core.errors import (
    ChainError,
    ChainGap,
    CorruptObject,
    Fenced,
    ObjectExists,
    RunExists,
    SettingsError,
    StoreError,
    UnknownName,
)
from everstep.storage.chain import Chain, Listing
from everstep.storage.folder import FolderStore
from everstep.storage.keys import BaseKey, ManifestKey, SegmentKey
from everstep.storage.manifest import CompressorSnapshot, Span
from everstep.storage.memory import MemoryStore
from everstep.storage.plan import plan_restore
from everstep.storage.store import Store


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore("chain") if request.param == "memory" else FolderStore(str(tmp_path))


def rows(*values: int) -> list[pa.RecordBatch]:
    return [pa.record_batch({"value": pa.array(values, pa.int64())})]


def start(store: Store, shards: int = 2, upto: int = 0) -> Chain:
    chain = Chain.create(store, "r", settings={"lr": 0.1}, shards=shards, exactness="bitwise")
    for shard in range(shards):
        chain.put_base(shard, 0, rows(0))
        if upto:
            chain.put_segment(shard, 1, upto, rows(*range(1, upto + 1)))
    return chain


def test_create_and_open(store: Store) -> None:
    assert Chain.runs(store) == []
    chain = start(store)
    assert Chain.runs(store) == ["r"]
    opened = Chain.open(store, "r")
    assert opened.manifest == chain.manifest
    assert opened.manifest.lineage == (Span(1, 0, 1, None), Span(1, 1, 1, None))
    with pytest.raises(RunExists):
        start(store)
    with pytest.raises(UnknownName, match="known: r"):
        Chain.open(store, "x")
    with pytest.raises(SettingsError):
        Chain.create(store, "a/b", settings={}, shards=1, exactness="warm")


def test_read_and_parent(store: Store) -> None:
    chain = start(store)
    first = chain.put_segment(0, 1, 2, rows(1, 2))
    second = chain.put_segment(0, 3, 3, rows(3))
    assert chain.read(first).header.parent == ""
    assert chain.read(second).header.parent == chain.read(first).crc
    assert chain.read(second).batches[0].to_pydict() == {"value": [3]}
    comp = chain.put_compressor(3, 1, rows(9), {"policy": "survivor"})
    assert chain.read(comp).header.extra == {"policy": "survivor"}
    listing = chain.listing()
    assert listing.compressor() == [comp]
    assert listing.segments(0) == [first, second]
    assert listing.bytes_of(SegmentKey) == sum(chain.read(key).size for key in (first, second))


def test_an_object_under_another_name_is_refused(store: Store) -> None:
    chain = start(store, upto=3)
    data = store.get(f"r/{SegmentKey(1, 0, 1, 3).path}")
    store.put(f"r/{SegmentKey(1, 0, 4, 6).path}", data)
    with pytest.raises(CorruptObject, match="first expected 4, got 1"):
        chain.read(SegmentKey(1, 0, 4, 6))


def test_takeover_fences(store: Store) -> None:
    old = start(store, upto=3)
    old.put_segment(0, 4, 5, rows(4, 5))
    new = Chain.take_over(store, "r", cut="common", settings={"lr": 0.2})
    assert (new.manifest.version, new.manifest.generation, new.manifest.state) == (3, 2, "open")
    assert new.manifest.settings == {"lr": 0.2}
    assert new.manifest.lineage[:2] == (Span(1, 0, 1, 3), Span(2, 0, 4, None))
    old.put_segment(1, 4, 6, rows(-4, -5, -6))
    for act in (old.check_tenure, lambda: old.update(exactness="warm")):
        with pytest.raises(Fenced, match="generation 2 owns"):
            act()
    with pytest.raises(Fenced):
        old.put_segment(1, 4, 6, rows(0, 0, 0))  # the name is taken, so it looks who owns the log
    with pytest.raises(Fenced):
        Chain.attach(store, "r", 1)
    assert plan_restore(new.manifest, new.listing()).target == 3
    new.check_tenure()


def test_takeover_each(store: Store) -> None:
    old = start(store, upto=3)
    old.put_segment(0, 4, 5, rows(4, 5))
    new = Chain.take_over(store, "r", cut="each", exactness="close")
    assert new.manifest.exactness == "close"
    assert [span for span in new.manifest.lineage if span.generation == 2] == [Span(2, 0, 6, None), Span(2, 1, 4, None)]


def test_takeover_refused_before_anybody_is_fenced(store: Store) -> None:
    chain = start(store, upto=3)
    chain.put_segment(0, 6, 7, rows(6, 7))
    with pytest.raises(ChainGap):
        Chain.take_over(store, "r", cut="common")
    chain.check_tenure()
    assert chain.manifest.version == 1
    assert Chain.take_over(store, "r", cut="common", at=2).manifest.lineage[0] == Span(1, 0, 1, 2)


def test_a_takeover_that_died_after_itsfence(store: Store) -> None:
    chain = start(store, upto=3)
    Chain.open(store, "r").fence()
    with pytest.raises(Fenced):
        chain.check_tenure()
    opened = Chain.open(store, "r")
    assert (opened.manifest.state, opened.manifest.generation) == ("claim", 2)
    assert plan_restore(opened.manifest, opened.listing()).target == 3
    new = Chain.take_over(store, "r", cut="common")
    assert new.manifest.generation == 3
    assert new.manifest.lineage == (Span(1, 0, 1, 3), Span(3, 0, 4, None), Span(1, 1, 1, 3), Span(3, 1, 4, None))


def test_takeover_race(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another takes over between this one's claim and its open manifest."""
    start(store, upto=3)
    real, others = Chain.fence, []

    def slow(self: Chain) -> None:
        real(self)
        if not others:
            others.append(None)
            others.append(Chain.take_over(store, "r", cut="common"))

    monkeypatch.setattr(Chain, "fence", slow)
    with pytest.raises(Fenced):
        Chain.take_over(store, "r", cut="common")
    assert others[1] is not None
    others[1].check_tenure()
    assert others[1].manifest.generation == 3


def test_a_closed_run_can_be_continued(store: Store) -> None:
    chain = start(store, upto=3)
    chain.update(state="closed", closing={"last_lsn": 3}, compressor=(CompressorSnapshot(1, 3, 1),))
    assert plan_restore(chain.manifest, chain.listing()).target == 3
    new = Chain.take_over(store, "r", cut="common")
    assert (new.manifest.state, new.manifest.closing) == ("open", None)
    assert new.manifest.compressor == (CompressorSnapshot(1, 3, 1),)


def test_a_closed_run_without_its_tail_is_not_taken_over(store: Store) -> None:
    chain = start(store, upto=3)
    chain.update(state="closed", closing={"last_lsn": 5})
    with pytest.raises(ChainGap, match="missing tail"):
        Chain.take_over(store, "r", cut="common")
    assert Chain.take_over(store, "r", cut="common", at=3).manifest.generation == 2


def test_two_writers_of_one_generation(store: Store) -> None:
    first = start(store)
    second = Chain.attach(store, "r", 1)
    second.update(exactness="close")
    first.update(state="closed", closing={"last_lsn": 0})
    assert (first.manifest.version, first.manifest.exactness) == (3, "close")
    second.check_tenure()
    assert second.manifest == first.manifest
    second.put_segment(0, 1, 2, rows(1, 2))
    first.put_segment(0, 1, 2, rows(1, 2))  # equal bytes: the same put
    with pytest.raises(StoreError, match="other content"):
        first.put_segment(0, 1, 2, rows(1, 3))
    with pytest.raises(ChainError, match="expected generation 5"):
        Chain.attach(store, "r", 5)


def test_a_lost_answer_is_no_failure() -> None:
    class Forgets(MemoryStore):
        def put(self, key: str, data: object, *, pace: object = None) -> None:
            super().put(key, data)  # type: ignore[arg-type]
            raise ObjectExists("a retry of the request found the object")

    store = Forgets()
    chain = start(store, upto=2)
    chain.update(exactness="close")
    new = Chain.take_over(store, "r", cut="common")
    assert new.manifest.generation == 2
    assert new.add_event("once", {})


def test_events(store: Store) -> None:
    chain = start(store)
    assert chain.events() == {}
    assert chain.add_event("kill@3", {"step": 3})
    assert not chain.add_event("kill@3", {"step": 3})
    assert Chain.open(store, "r").events() == {"kill@3": {"step": 3}}
    store.put("r/events/bad.json", b"[1]")
    with pytest.raises(CorruptObject, match="bad"):
        chain.events()


def test_a_hole_in_the_manifests(store: Store) -> None:
    chain = start(store)
    chain.update()
    chain.update()
    store.delete(f"r/{ManifestKey(2).path}")
    with pytest.raises(ChainError, match=f"2 is missing .*{ManifestKey(2).path}"):
        Chain.open(store, "r")


def test_a_removed_manifest_is_noticed(store: Store) -> None:
    chain = start(store)
    chain.update()
    store.delete(f"r/{ManifestKey(2).path}")
    with pytest.raises(ChainError, match="expected manifest 2"):
        chain.check_tenure()
    store.delete(f"r/{ManifestKey(1).path}")
    with pytest.raises(ChainError, match="got none"):
        chain.check_tenure()
    with pytest.raises(ChainError, match="g000001"):
        Chain.open(store, "r")
    with pytest.raises(ChainError, match="g000001"):
        start(store)


def test_a_generation_that_no_manifest_knows(store: Store) -> None:
    chain = start(store)
    store.put(f"r/{BaseKey(4, 0, 3, 'x').path}", b"x")
    with pytest.raises(ChainError, match="r/g000004.*generation 1"):
        Chain.open(store, "r")
    assert chain.listing().strays == ()


def test_strays(store: Store) -> None:
    chain = start(store)
    store.put("r/notes.txt", b"x")
    assert chain.listing().strays == ("notes.txt",)


def test_a_manifest_of_another_run(store: Store) -> None:
    start(store)
    store.put(f"copy/{ManifestKey(1).path}", store.get(f"r/{ManifestKey(1).path}"))
    with pytest.raises(CorruptObject, match="expected run 'copy'"):
        Chain.open(store, "copy")


@pytest.mark.parametrize("cut", ["common", "each"])
def test_a_put_that_lands_after_the_takeover_looked(store: Store, monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    old = start(store, upto=3)
    real, looks = Chain.listing, []

    def look(self: Chain) -> Listing:
        found = real(self)
        looks.append(self.manifest.state)
        if looks == ["open", "claim"]:
            old.put_segment(0, 4, 6, rows(-4, -5, -6))
            old.put_base(0, 6, rows(-6))
        return found

    monkeypatch.setattr(Chain, "listing", look)
    new = Chain.take_over(store, "r", cut=cut)  # type: ignore[arg-type]
    assert looks == ["open", "claim"]
    plan = plan_restore(new.manifest, real(new))
    assert (plan.target, plan.highest) == (3, 3)
    with pytest.raises(Fenced):
        old.check_tenure()
