"""Collecting garbage: the order of its steps, and what happens when it is stopped or dies at any of them."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from everstep.core.errors import ChainError, Fenced, RunExists, StepNotKept, StoreError, UnknownName
from everstep.storage import retention
from everstep.storage.chain import Chain
from everstep.storage.collect import POINTS, PUT_S, collect, collect_all, delete_run
from everstep.storage.fork import fork
from everstep.storage.keys import ManifestKey, SegmentKey
from everstep.storage.memory import MemoryStore
from everstep.storage.retention import Retention
from tests.unit.storage.runs import NOW_OLD, Clock, Recording, expected, merge, names, rows, start, state, train


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def once(point: str, act: Callable[[], None]) -> Callable[[str], None]:
    """Return what does something the first time a point is passed."""
    done: list[str] = []

    def at(passed: str) -> None:
        if passed == point and not done:
            done.append(passed)
            act()

    return at


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


def test_commit_then_pins_then_delete(time: Clock) -> None:
    store = Recording()
    chain = start(store, upto=30)
    store.calls.clear()
    passed: list[str] = []
    done = collect(chain, NOW_OLD, at=lambda point: passed.append(point))
    verbs = [f"{verb} {key}" for verb, key in store.calls]
    first_delete = next(n for n, call in enumerate(verbs) if call.startswith("delete"))
    commit = next(n for n, call in enumerate(verbs) if call.startswith("put r/manifest/"))
    assert commit < verbs.index("list r/pins/", commit) < first_delete
    assert [call for call in verbs if not call.startswith("list")][-1] == f"sweep {PUT_S}"
    assert passed[:3] == list(POINTS[:3]) and set(passed) == set(POINTS) and passed[-3:] == list(POINTS[-3:])
    assert done.deleted == len(done.plan.drop) == 18 and done.bytes == sum(item.size for item in done.plan.drop)
    assert not done.dry_run and done.swept == 0
    assert state(chain) == expected(30)
    assert collect(chain, NOW_OLD).deleted == 0


def test_a_dry_run_touches_nothing(time: Clock) -> None:
    store = Recording()
    chain = start(store, upto=30)
    store.calls.clear()
    done = collect(chain, NOW_OLD, dry_run=True)
    assert done.dry_run and done.deleted == 18 and done.bytes > 0
    assert {verb for verb, _ in store.calls} == {"list"}


def test_a_fenced_collector_drops_nothing(time: Clock) -> None:
    store = MemoryStore()
    chain = start(store, upto=30)
    Chain.take_over(store, "r", cut="common")
    before = names(store)
    with pytest.raises(Fenced):
        collect(chain, NOW_OLD)
    assert names(store) == before


def test_a_collector_that_is_fenced_between_plan_and_drop(time: Clock) -> None:
    store = MemoryStore()
    chain = start(store, upto=30)
    with pytest.raises(Fenced):
        collect(chain, NOW_OLD, at=once("planned", lambda: void(Chain.take_over(store, "r", cut="common", at=15))))
    assert state(chain) == expected(15)


def void(_: object) -> None:
    pass


def test_what_was_named_meanwhile_stays(time: Clock) -> None:
    """Another writer of the generation names a base between plan and drop: the plan is made again."""
    store = MemoryStore()
    chain = start(store, upto=30)
    train(chain, 31, 40)
    key = chain.put_base(0, 40, rows(*range(1, 41)))
    other = Chain.attach(store, "r", 1)
    collect(chain, NOW_OLD, at=once("planned", lambda: other.name_bases([other.proved(key)])))
    assert key in {base.key for base in chain.manifest.bases}
    assert state(chain) == expected(40)


@pytest.mark.parametrize("point", POINTS)
def test_woken_after_more_training_and_another_collection(time: Clock, point: str) -> None:
    store = MemoryStore()
    chain = start(store, upto=30)

    def more() -> None:
        train(chain, 31, 45)
        merge(chain, 40)
        collect(Chain.open(store, "r"), NOW_OLD)
        collect(Chain.open(store, "r"), NOW_OLD)

    collect(Chain.open(store, "r"), NOW_OLD, at=once(point, more))
    for step in (40, 43, 45):
        assert state(chain, step) == expected(step)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("at", [None, 30])
def test_woken_after_a_takeover(time: Clock, point: str, at: int | None) -> None:
    store = MemoryStore()
    chain = start(store, upto=30)
    train(chain, 31, 35)

    def take_over() -> None:
        new = Chain.take_over(store, "r", cut="common", at=at)
        train(new, (at or 35) + 1, 45)
        merge(new, 45)

    try:
        collect(chain, NOW_OLD, at=once(point, take_over))
        assert point != "planned"
    except Fenced:
        assert point == "planned"
    for step in (30, 32, 35, 45):
        assert state(chain, step) == expected(step)
    collect(Chain.open(store, "r"), NOW_OLD)
    assert state(chain) == expected(45)


@pytest.mark.parametrize("point", POINTS)
def test_woken_after_a_fork_of_what_it_was_about_to_delete(time: Clock, point: str) -> None:
    store = MemoryStore()
    chain = start(store, upto=30)
    children: list[Chain] = []

    def fork_it() -> None:
        try:
            children.append(fork(chain, 15, "f", settings={}, exactness="bitwise"))
        except StepNotKept:
            assert point != "planned"

    collect(Chain.open(store, "r"), NOW_OLD, at=once(point, fork_it))
    assert bool(children) == (point == "planned")
    for child in children:
        assert state(child) == expected(15)
        collect(chain, NOW_OLD)
        assert state(child) == expected(15)
    time.now += 100
    collect(chain, NOW_OLD)
    assert (names(store, "r/pins/") == []) == (not children)


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_leaves_a_valid_chain_and_the_next_collection_ends_it(time: Clock, point: str) -> None:
    store, clean = MemoryStore(), MemoryStore()
    with pytest.raises(Crash):
        collect(start(store, upto=30), NOW_OLD, at=once(point, crash))
    chain = Chain.open(store, "r")
    assert state(chain) == expected(30)
    collect(chain, NOW_OLD)
    undisturbed = start(clean, upto=30)
    collect(undisturbed, NOW_OLD)
    assert shapes(store) == shapes(clean)
    assert state(chain) == expected(30)


def shapes(store: MemoryStore) -> list[str]:
    return [re.sub("-[0-9a-f]{12}[.]", ".", name) for name in names(store) if "/manifest/" not in name]


def test_a_store_that_fails_in_the_middle(time: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    chain = start(store, upto=30)
    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", lambda key: (_ for _ in ()).throw(StoreError("no")))
        with pytest.raises(StoreError):
            collect(chain, NOW_OLD)
    dropped = chain.manifest.dropped
    assert len(dropped) == 18
    assert collect(chain, NOW_OLD).deleted == 18
    collect(chain, NOW_OLD)
    assert chain.manifest.dropped == ()


def test_batches(time: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH", 4)
    chain = start(MemoryStore(), upto=30)
    first = collect(chain, NOW_OLD)
    assert first.deleted == 4 and first.plan.more
    rest = collect_all(chain, NOW_OLD)
    assert rest.deleted == 14 and not rest.plan.more
    assert state(chain) == expected(30)


def test_old_manifests_go_and_a_writer_that_slept_meanwhile_is_fenced(
    time: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that a sleeping writer would write next is free again: what it writes there must count for nobody."""
    monkeypatch.setattr(retention, "MANIFESTS_KEPT", 3)
    store = MemoryStore()
    start(store, upto=30)
    asleep, taker = Chain.attach(store, "r", 1), Chain.open(store, "r")
    new = Chain.take_over(store, "r", cut="common")
    for _ in range(9):
        new.update()
    time.now += 100
    keep = Retention(9, 0, 0.0, 50.0)
    collect(new, keep)
    versions = new.listing().versions()
    assert versions[0] == new.manifest.oldest > asleep.manifest.version + 1
    with pytest.raises(Fenced):
        asleep.update(exactness="warm")
    assert (asleep.manifest.version + 1) in new.listing().versions()  # it is there, but counts for nobody
    with pytest.raises(Fenced):
        collect(asleep, NOW_OLD)
    assert Chain.open(store, "r").manifest == new.manifest
    assert state(new) == expected(30)
    for _ in range(9):
        new.update()
    time.now += 100
    collect(new, keep)
    assert new.listing().versions()[0] == new.manifest.oldest  # that one is gone, too
    taker.fence()  # a takeover that slept as long finds its way to the end
    assert taker.manifest.version == new.manifest.version + 1


def test_a_creator_that_slept_does_not_create_the_run_again(time: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MANIFESTS_KEPT", 3)
    store = MemoryStore()
    real = store.put

    def put(key: str, data: object, **more: object) -> None:
        monkeypatch.setattr(store, "put", real)
        other = start(store, upto=10)
        for _ in range(9):
            other.update()
        collect(other, Retention(9, 0, 0.0, 0.0))
        assert other.manifest.oldest > 1
        real(key, data)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "put", put)
    with pytest.raises(RunExists):
        Chain.create(store, "r", settings={}, shards=2, exactness="warm")
    assert state(Chain.open(store, "r")) == expected(10)


def test_delete_a_run(time: Clock) -> None:
    store = MemoryStore()
    chain = start(store, upto=30)
    chain.add_event("once", {})
    writer = Chain.attach(store, "r", 1)
    delete_run(chain)
    assert names(store) == []
    with pytest.raises(ChainError, match="got none"):
        writer.check_tenure()
    with pytest.raises(ChainError):
        writer.update()
    with pytest.raises(UnknownName):
        writer.fence()
    assert names(store) == []
    start(store, upto=5)  # the name is free again


def test_what_a_writer_puts_while_its_run_is_deleted_goes_with_the_next_call(time: Clock) -> None:
    store = Recording()
    chain = start(store, upto=10)
    real, done = store.delete, []

    def delete(key: str) -> None:
        real(key)
        if not done:
            done.append(None)
            train(chain, 11, 12)

    store.delete = delete  # type: ignore[method-assign]
    delete_run(Chain.open(store, "r"))
    assert [name for name in names(store) if "/log/" in name] == [
        f"r/{SegmentKey(2, s, 11, 12).path}".replace("g000002", "g000001") for s in (0, 1)
    ]
    with pytest.raises(Fenced):
        chain.check_tenure()
    delete_run(Chain.open(store, "r", deleted_too=True))
    assert names(store) == []


def test_a_deleted_run_waits_for_its_forks(time: Clock) -> None:
    store = MemoryStore()
    parent = start(store, upto=30)
    first = fork(parent, 15, "f1", settings={}, exactness="bitwise")
    second = fork(parent, 25, "f2", settings={}, exactness="bitwise")
    delete_run(parent)
    for act in (lambda: Chain.open(store, "r"), lambda: Chain.take_over(store, "r", cut="common")):
        with pytest.raises(UnknownName, match="run 'r' in memory: was deleted; only what forks of it use is left"):
            act()
    with pytest.raises(
        RunExists, match="'r' in memory: was deleted, but what forks of it use is still there"
    ) as caught:
        Chain.create(store, "r", settings={}, shards=2, exactness="bitwise")
    assert "choose another run.name" in caught.value.hint
    assert state(first) == expected(15) and state(second) == expected(25)
    delete_run(first)
    time.now += 100
    delete_run(Chain.open(store, "r", deleted_too=True))
    assert state(second) == expected(25)
    assert not any("/log/" in name and "000000000015.arrow" in name for name in names(store, "r/"))
    delete_run(second)
    time.now += 100
    delete_run(Chain.open(store, "r", deleted_too=True))
    assert names(store) == []


@pytest.mark.parametrize("nth", range(1, 12))
def test_a_crash_while_a_run_is_deleted(time: Clock, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    store = MemoryStore()
    chain = start(store, upto=10)
    real, left = store.delete, [nth]

    def delete(key: str) -> None:
        left[0] -= 1
        if not left[0]:
            raise Crash
        real(key)

    with monkeypatch.context() as patch:
        patch.setattr(store, "delete", delete)
        with pytest.raises(Crash):
            delete_run(chain)
    with pytest.raises(UnknownName):
        Chain.open(store, "r")
    delete_run(Chain.open(store, "r", deleted_too=True))
    assert names(store) == []


def test_a_deletion_does_not_sweep_what_other_runs_are_writing(time: Clock) -> None:
    store = Recording()
    delete_run(start(store, upto=10))
    assert {float(key) for verb, key in store.calls if verb == "sweep"} == {PUT_S}


def test_a_takeover_that_meets_a_deletion_ends(time: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    parent = start(store, upto=10)
    fork(parent, 5, "f", settings={}, exactness="bitwise")
    real = Chain.fence

    def fence(self: Chain, *more: object) -> None:
        monkeypatch.setattr(Chain, "fence", real)
        delete_run(Chain.open(store, "r"))
        real(self)

    monkeypatch.setattr(Chain, "fence", fence)
    with pytest.raises(UnknownName, match="was deleted"):
        Chain.take_over(store, "r", cut="common")
    assert Chain.open(store, "r", deleted_too=True).manifest.state == "deleted"
    assert ManifestKey(1).path not in [name.removeprefix("r/") for name in names(store)]
