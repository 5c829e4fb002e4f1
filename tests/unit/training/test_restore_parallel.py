"""Restoring shards side by side: what is read, when, by whom, and whose memory a state ends up in."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from everstep.core.errors import StateMismatch
from everstep.storage.chain import Chain
from everstep.storage.keys import BaseKey, DataKey, SegmentKey
from everstep.storage.memory import MemoryStore
from everstep.storage.objects import StoredObject
from everstep.training.record import lsn_of
from everstep.training.restore import restore
from everstep.training.shard_state import ShardState
from tests.unit.training.test_restore import STEPS, Stored
from tests.unit.training.worlds import same, toy_recipe, whole_digest, whole_tensors


@pytest.fixture
def stored() -> Stored:
    return Stored(toy_recipe(norm=True, shards=2))


class Watched(Chain):
    """A chain that notes what is read, and calls `before` first."""

    def __init__(self, chain: Chain, before: Callable[[DataKey], None] = lambda key: None) -> None:
        super().__init__(chain.store, chain.run, chain.manifest)
        self.seen: list[Any] = []
        self.before = before

    def read(self, key: DataKey) -> StoredObject:
        self.seen.append(key)
        self.before(key)
        return super().read(key)


def test_only_the_base_and_what_follows_it_are_read(stored: Stored) -> None:
    chain = Watched(stored.chain)
    restore(chain, stored.blueprint, target=8)
    assert sorted(type(key).__name__ for key in chain.seen) == ["BaseKey"] * 3 + ["SegmentKey"] * 3
    assert all(getattr(key, "lsn", 6) == 6 and getattr(key, "first", 7) == 7 for key in chain.seen)


def test_damage_elsewhere_does_not_replay_a_shard_again(stored: Stored) -> None:
    stored.damage(BaseKey, 1, 6)
    chain = Watched(stored.chain)
    restore(chain, stored.blueprint)
    assert Counter(key.shard for key in chain.seen) == {0: 2, 1: 4, 2: 2}


def test_the_next_object_is_read_while_one_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = Stored(toy_recipe(shards=1), bases=())
    reading, merge = {first: threading.Event() for first in (4, 7)}, ShardState.merge

    def before(key: DataKey) -> None:
        if isinstance(key, SegmentKey) and key.shard == 1 and key.first in reading:
            reading[key.first].set()

    def slow(self: ShardState, batch: Any) -> None:
        wanted = reading.get(lsn_of(batch) + 3)
        assert self.shard == 0 or wanted is None or wanted.wait(10)
        merge(self, batch)

    monkeypatch.setattr(ShardState, "merge", slow)
    states, _, _ = restore(Watched(stored.chain, before), stored.blueprint)
    assert whole_digest(list(states.values())) == stored.digests[STEPS]


def test_an_error_in_one_shard_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored(toy_recipe(shards=2), bases=())
    merged, failed, merge = Counter[int](), threading.Event(), ShardState.merge

    def failing(self: ShardState, batch: Any) -> None:
        if self.shard == 1 and lsn_of(batch) == 2:
            failed.set()
            raise StateMismatch("step 2 is off")
        merged[self.shard] += 1
        merge(self, batch)
        if self.shard == 2:  # from here on the other shard is known to fail
            assert failed.wait(10)
            time.sleep(0.05)

    monkeypatch.setattr(ShardState, "merge", failing)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    with pytest.raises(StateMismatch, match="step 2 is off"):
        restore(stored.chain, stored.blueprint)
    assert merged[1] == 1 and merged[2] < STEPS


def test_every_shard_has_one_thread_of_torch_and_the_caller_keeps_its_own(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, merge = set[int](), ShardState.merge

    def counting(self: ShardState, batch: Any) -> None:
        used.add(torch.get_num_threads())
        merge(self, batch)

    monkeypatch.setattr(ShardState, "merge", counting)
    torch.set_num_threads(2)
    try:
        restore(stored.chain, stored.blueprint)
        fresh: list[int] = []
        thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert used == {1} and torch.get_num_threads() == 2 and fresh == [2]
    finally:
        torch.set_num_threads(1)


class Giving(MemoryStore):
    """A store that gives away writable memory, as a folder does."""

    def get(self, key: str, start: int = 0, length: int | None = None) -> Any:
        return bytearray(super().get(key, start, length))


@pytest.mark.parametrize("kind", [MemoryStore, Giving])
def test_a_restored_state_owns_its_memory(kind: type[MemoryStore]) -> None:
    stored = Stored(toy_recipe(norm=True, shards=2))
    store = kind()
    store._objects = dict(stored.store._objects)
    chain = Chain(store, "r", stored.chain.manifest)
    for target in (6, STEPS):
        states, _, _ = restore(chain, stored.blueprint, target=target)
        assert whole_digest(list(states.values())) == stored.digests[target]
        for tensor in whole_tensors(list(states.values())).values():
            tensor.zero_()
    assert {name: data for name, (data, _) in store._objects.items()} == {
        name: data for name, (data, _) in stored.store._objects.items()
    }
    assert same({n: t.clone() for n, t in stored.worker.state.tensors().items()}, stored.tensors)
    fresh, _, _ = restore(chain, stored.blueprint)
    assert whole_digest(list(fresh.values())) == stored.digests[STEPS]
