"""Forks: any kept step of any run, without a copy, whatever becomes of the parent."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from everstep.core.errors import ChainError, RunExists, SettingsError, StepNotKept, UnknownName
from everstep.storage.chain import Chain
from everstep.storage.collect import collect, delete_run
from everstep.storage.encrypted import Key
from everstep.storage.fork import fork
from everstep.storage.keys import CompressorKey
from everstep.storage.manifest import CompressorSnapshot, Kept, Origin
from everstep.storage.memory import MemoryStore
from everstep.storage.pins import read_pins
from everstep.storage.plan import plan_restore
from tests.unit.storage.runs import NOW_OLD, Clock, expected, merge, names, rows, start, state, train, values


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def forked(parent: Chain, step: int, run: str = "f") -> Chain:
    return fork(parent, step, run, settings={"lr": 0.5}, exactness="close")


@pytest.mark.parametrize("step", [0, 3, 10, 13, 20, 25])
@pytest.mark.parametrize("closed", [False, True])
def test_any_step_of_a_run(time: Clock, step: int, closed: bool) -> None:
    parent = start(MemoryStore(), upto=20)
    train(parent, 21, 25)
    if closed:
        parent.update(state="closed", closing={"last_lsn": 25})
    child = forked(parent, step)
    now = child.manifest
    assert (now.generation, now.state, now.exactness, now.settings) == (1, "open", "close", {"lr": 0.5})
    assert now.origin == Origin("r", step) and now.origins == ("r",) and now.kept == (Kept(step // 10 * 10 + 1, None),)
    assert state(child) == expected(step)
    assert [info.key for info in child.store.list("f/")] == [f"f/manifest/{1:020d}.json"]  # nothing was copied
    train(child, step + 1, step + 4)
    assert state(child) == expected(step + 4)
    if step % 10:
        assert state(child, step - 1) == expected(step - 1)
    pins = read_pins(child.store, "r")
    assert [(made.child, made.until) for made in pins] == [("f", None)]


def test_a_step_that_is_not_there(time: Clock) -> None:
    parent = start(MemoryStore(), upto=30)
    with pytest.raises(StepNotKept, match="step 31 cannot be restored; steps that can: 0 to 30"):
        forked(parent, 31)
    collect(parent, NOW_OLD)
    with pytest.raises(StepNotKept, match="step 15"):
        forked(parent, 15)
    assert not any("pins" in name for name in names(parent.store))
    assert [name for name in names(parent.store) if name.startswith("f/")] == []


def test_a_name_that_is_taken_or_cannot_be_one(time: Clock) -> None:
    store = MemoryStore()
    parent = start(store, upto=10)
    forked(parent, 5)
    before = names(store)
    with pytest.raises(RunExists, match="run 'f' exists already"):
        forked(parent, 6)
    with pytest.raises(SettingsError, match="run name"):
        forked(parent, 6, "a b")
    assert names(store) == before  # no pin is left


def test_a_run_that_is_being_taken_over_has_no_certain_end(time: Clock) -> None:
    parent = start(MemoryStore(), upto=10)
    Chain.open(parent.store, "r").fence()
    with pytest.raises(ChainError, match="is being taken over"):
        forked(parent, 5)


def test_a_deleted_parent(time: Clock) -> None:
    parent = start(MemoryStore(), upto=10)
    forked(parent, 5)
    delete_run(Chain.open(parent.store, "r"))
    with pytest.raises(UnknownName, match="was deleted"):
        forked(parent, 5, "g")


def test_what_a_zombie_adds_while_the_run_is_taken_over_is_not_forked(
    time: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork looked at the manifest before a takeover, and at the objects after it."""
    store = MemoryStore()
    parent = start(store, upto=10)
    stale = Chain.open(store, "r")
    Chain.take_over(store, "r", cut="common")
    train(parent, 11, 15, sign=-1)
    with pytest.raises(StepNotKept):
        fork(stale, 15, "f", settings={}, exactness="bitwise")
    assert state(fork(stale, 10, "f", settings={}, exactness="bitwise")) == expected(10)


def test_after_takeovers(time: Clock) -> None:
    store = MemoryStore()
    parent = start(store, upto=14)
    merge(parent, 12, name=False, shards=[0])
    second = Chain.take_over(store, "r", cut="common", at=13)
    merge(second, 13, name=False, shards=[1])
    train(second, 14, 18)
    for step in (5, 10, 11, 12, 13, 14, 17, 18):
        child = forked(second, step, f"f{step}")
        assert state(child) == expected(step)
        child = Chain.take_over(store, f"f{step}", cut="common")
        train(child, step + 1, step + 2)
        assert state(child) == expected(step + 2)
        rewound = Chain.take_over(store, f"f{step}", cut="common", at=step)
        assert state(rewound) == expected(step)


def test_a_fork_of_a_fork(time: Clock) -> None:
    store = MemoryStore()
    child = forked(start(store, upto=20), 13)
    train(child, 14, 18)
    for step in (12, 13, 16):
        grandchild = forked(child, step, f"g{step}")
        assert grandchild.manifest.origin == Origin("f", step)
        assert grandchild.manifest.origins == (("f", "r") if step > 13 else ("r",))
        assert state(grandchild) == expected(step)
        train(grandchild, step + 1, step + 3)
        assert state(grandchild) == expected(step + 3)
    assert {made.child for made in read_pins(store, "r")} == {"f", "g12", "g13", "g16"}
    assert {made.child for made in read_pins(store, "f")} == {"g16"}
    time.now += 100
    delete_run(Chain.open(store, "r"))
    delete_run(Chain.open(store, "f"))
    for step in (12, 13, 16):
        assert state(Chain.open(store, f"g{step}")) == expected(step + 3)


def test_the_compressor_state_at_just_this_step_comes_along(time: Clock) -> None:
    parent = start(MemoryStore(), upto=20)
    for lsn in (5, 15):
        for number in (0, 1):
            parent.put_compressor(lsn, number, rows(lsn, number), {})
        parent.update(compressor=(*parent.manifest.compressor, CompressorSnapshot(1, lsn, 2)))
    child = forked(parent, 15)
    assert child.manifest.compressor == (CompressorSnapshot(1, 15, 2, "r"),)
    assert forked(parent, 16, "g").manifest.compressor == ()
    collect(parent, NOW_OLD)
    delete_run(parent)
    assert values(child, CompressorKey(1, 15, 1, "r")) == [15, 1]
    grandchild = forked(child, 15, "h")
    assert grandchild.manifest.compressor == child.manifest.compressor
    assert state(grandchild) == expected(15)


def test_an_encrypted_parent(time: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = bytes(range(32))
    monkeypatch.setenv("EVERSTEP_ENCRYPTION_KEY", base64.b64encode(secret).decode())
    store = MemoryStore()
    parent = start(store, upto=20, key_id=Key(secret).id)
    child = forked(parent, 13)
    assert child.manifest.key_id == parent.manifest.key_id
    train(child, 14, 16)
    collect(parent, NOW_OLD)
    delete_run(parent)
    assert state(Chain.open(store, "f")) == expected(16)
    assert all(store.get(name).startswith(b"EVERSTEP-AEAD-1") for name in names(store) if "/manifest/" not in name)


def test_a_fork_grows_out_of_its_parent(time: Clock) -> None:
    store = MemoryStore()
    parent = start(store, upto=30)
    child = forked(parent, 15)
    collect(parent, NOW_OLD)
    assert state(child) == expected(15)
    held_by_child = {f"r/{path}" for made in read_pins(store, "r") for path in made.objects}
    assert len(held_by_child) == 4 and held_by_child <= set(names(store))
    train(child, 16, 30)
    merge(child, 30)
    collect(child, NOW_OLD)
    now = Chain.open(store, "f").manifest
    assert now.origins == () and now.origin == Origin("r", 15)
    assert not any(name.startswith("f/") and "0015-" in name for name in names(store))
    collect(parent, NOW_OLD)
    assert read_pins(store, "r") == []
    assert not held_by_child & set(names(store))
    assert state(child) == expected(30) and state(parent) == expected(30)


def test_the_parents_other_bases_are_none_of_the_forks(time: Clock) -> None:
    """The parent writes a base later that lies within the fork's part of it; the fork has no pin for it."""
    parent = start(MemoryStore(), upto=10)
    train(parent, 11, 20)
    child = forked(parent, 20)
    merge(parent, 15, name=False)
    plan = plan_restore(child.manifest, child.listing())
    assert {part.base.lsn for part in plan.shards} == {10}


def test_a_fork_that_took_so_long_that_its_pins_were_removed(time: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped between its pin and its manifest for longer than a collector waits."""
    store = MemoryStore()
    parent = start(store, upto=30)
    real = Chain.found

    def late(step: int, name: str, deleting: bool) -> Chain:
        def found(where, first):  # type: ignore[no-untyped-def]
            time.now += 100
            collect(Chain.open(store, "r"), NOW_OLD if deleting else replace(NOW_OLD, rounds=9))
            return real(where, first)

        with monkeypatch.context() as patch:
            patch.setattr(Chain, "found", found)
            return forked(parent, step, name)

    child = late(15, "kept", False)
    collect(parent, NOW_OLD)  # only now it would go
    assert state(child) == expected(15)
    train(parent, 31, 40)
    merge(parent, 40)
    parent.check_tenure()
    with pytest.raises(StepNotKept, match="no longer kept"):
        late(35, "gone", True)
    assert not any(name.startswith("gone/") for name in names(store))
    with pytest.raises(UnknownName):
        Chain.open(store, "gone")
    assert {made.child for made in read_pins(store, "r")} == {"kept"}
