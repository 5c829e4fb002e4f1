"""Pins: what counts, what is void, and what a pin that came too late is told."""

from __future__ import annotations

import pytest

from everstep.core.errors import CorruptObject, ObjectMissing, StepNotKept
from everstep.storage.chain import Chain
from everstep.storage.collect import collect, delete_run, held, unpin
from everstep.storage.fork import fork
from everstep.storage.memory import MemoryStore
from everstep.storage.pins import RESTORE_S, confirm, live, pin, read_pins
from everstep.storage.plan import plan_restore
from tests.unit.storage.runs import NOW_OLD, Clock, carried_out, expected, keys_of, merge, names, start, train


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def needs(chain: Chain, step: int) -> list:  # type: ignore[type-arg]
    return keys_of(plan_restore(chain.manifest, chain.listing(), target=step))


def test_what_is_held_stays_until_it_is_let_go(time: Clock) -> None:
    chain = start(MemoryStore(), upto=30)
    plan = plan_restore(chain.manifest, chain.listing(), target=15)
    with held(chain, keys_of(plan)):
        done = collect(chain, NOW_OLD)
        assert done.plan.spared == {"pinned": 4}
        assert carried_out(chain, plan) == expected(15)
    assert names(chain.store, "r/pins/") == []
    collect(chain, NOW_OLD)
    with pytest.raises(ObjectMissing):
        carried_out(chain, plan)


def test_a_pin_that_comes_after_the_drop_holds_nothing(time: Clock) -> None:
    chain = start(MemoryStore(), upto=30)
    keys = needs(chain, 15)

    def late(point: str) -> None:
        if point == "dropped":
            with pytest.raises(StepNotKept, match=r"4 of 4 objects of run 'r'.*the first g000001/base") as caught:
                with held(chain, keys):
                    pass
            assert "chain ls r" in caught.value.hint

    collect(chain, NOW_OLD, at=late)
    assert names(chain.store, "r/pins/") == []
    with pytest.raises(StepNotKept):
        confirm(chain, pin(chain, keys))


def test_a_pin_between_plan_and_drop_is_told_and_one_before_the_plan_is_not(time: Clock) -> None:
    chain = start(MemoryStore(), upto=30)
    keys, told = needs(chain, 15), []

    def meanwhile(point: str) -> None:
        if point == "planned":
            pins = pin(chain, keys)
            confirm(chain, pins)  # nothing is dropped yet: from here on these objects must stay
            told.extend(pins)

    collect(chain, NOW_OLD, at=meanwhile)
    assert {f"r/{key.path}" for key in keys} <= set(names(chain.store))
    unpin(chain.store, told)
    collect(chain, NOW_OLD)
    assert not {f"r/{key.path}" for key in keys} & set(names(chain.store))


def test_a_restore_that_never_ended_is_taken_for_dead(time: Clock) -> None:
    chain = start(MemoryStore(), upto=30)
    pin(chain, needs(chain, 15))
    time.now += RESTORE_S - 1
    assert [len(part) for part in live(chain.store, "r", grace_s=60.0)] == [1, 0]
    time.now += 1
    assert [len(part) for part in live(chain.store, "r", grace_s=60.0)] == [0, 1]
    collect(chain, NOW_OLD)
    assert names(chain.store, "r/pins/") == []


def test_a_fork_that_was_never_founded_is_waited_for_a_while(time: Clock) -> None:
    chain = start(MemoryStore(), upto=30)
    pin(chain, needs(chain, 15), child="f")
    time.now += 59
    assert len(live(chain.store, "r", grace_s=60.0)[0]) == 1
    assert collect(chain, NOW_OLD).plan.spared == {"pinned": 4}
    time.now += 1
    collect(chain, NOW_OLD)
    assert names(chain.store, "r/pins/") == []


def test_a_pin_of_another_childs_name_does_not_count(time: Clock) -> None:
    store = MemoryStore()
    chain = start(store, upto=30)
    start(store, "f")  # no fork of it
    pin(chain, needs(chain, 15), child="f")
    assert [len(part) for part in live(store, "r", grace_s=60.0)] == [0, 1]


def test_a_damaged_pin_stops_collection(time: Clock) -> None:
    chain = start(MemoryStore(), upto=30)
    chain.store.put("r/pins/odd.json", b"[]")
    before = names(chain.store)
    with pytest.raises(CorruptObject, match="pin r/pins/odd.json is damaged"):
        collect(chain, NOW_OLD)
    assert names(chain.store) == before
    chain.store.delete("r/pins/odd.json")
    assert read_pins(chain.store, "r") == []


def test_a_pin_that_vanishes_while_they_are_read(time: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = start(MemoryStore(), upto=30)
    pins = pin(chain, needs(chain, 15))
    real = chain.store.get

    def get(key: str) -> bytes:
        unpin(chain.store, pins)
        return bytes(real(key))

    monkeypatch.setattr(chain.store, "get", get)
    assert read_pins(chain.store, "r") == []


def test_a_restore_of_a_fork_holds_the_parents_objects_while_the_fork_lets_go(time: Clock) -> None:
    store = MemoryStore()
    parent = start(store, upto=30)
    child = fork(parent, 15, "f", settings={}, exactness="bitwise")
    collect(parent, NOW_OLD)
    plan = plan_restore(child.manifest, child.listing(), target=15)
    train(child, 16, 25)
    merge(child, 25)
    with held(child, keys_of(plan)):
        collect(child, NOW_OLD)
        assert Chain.open(store, "f").manifest.origins == ()
        time.now += 100
        collect(parent, NOW_OLD)
        assert carried_out(child, plan) == expected(15)
    collect(parent, NOW_OLD)
    with pytest.raises(StepNotKept, match="run 'f': step no longer kept: 4 of 4 objects of run 'r'"):
        confirm(child, pin(child, keys_of(plan)))


def test_a_restore_of_a_fork_is_not_refused_for_what_its_parent_dropped(time: Clock) -> None:
    """The fork came between a collector's plan and its drop: what it uses is named as dropped, but held by it."""
    store = MemoryStore()
    parent = start(store, upto=30)
    made = []

    def between(point: str) -> None:
        if point == "planned":
            made.append(fork(parent, 15, "f", settings={}, exactness="bitwise"))

    collect(Chain.open(store, "r"), NOW_OLD, at=between)
    child = made[0]
    plan = plan_restore(child.manifest, child.listing(), target=15)
    with held(child, keys_of(plan)):
        assert carried_out(child, plan) == expected(15)
    grandchild = fork(child, 12, "g", settings={}, exactness="bitwise")
    delete_run(child)
    time.now += 100
    collect(Chain.open(store, "r"), NOW_OLD)
    assert carried_out(grandchild, plan_restore(grandchild.manifest, grandchild.listing())) == expected(12)


def test_a_collector_looks_again_after_it_judged_a_fork(time: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore pins and the fork lets go between the collector's list of pins and its look at the fork."""
    from everstep.storage import manifests

    store = MemoryStore()
    parent = start(store, upto=30)
    child = fork(parent, 15, "f", settings={}, exactness="bitwise")
    collect(parent, NOW_OLD)
    train(child, 16, 25)
    merge(child, 25)
    plan = plan_restore(child.manifest, child.listing(), target=15)
    real, done = manifests.latest, []

    def latest(where, run):  # type: ignore[no-untyped-def]
        if run == "f" and not done:
            done.append(None)
            confirm(child, pin(child, keys_of(plan)))
            collect(child, NOW_OLD)
        return real(where, run)

    monkeypatch.setattr(manifests, "latest", latest)
    time.now += 100
    counting, void = live(store, "r", grace_s=60.0)
    assert [made.child for made in counting] == [""] and [made.child for made in void] == ["f"]
