"""Writing a replica into the store: what is due, nothing twice, nothing lost while the store refuses."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
import torch

from everstep.core.errors import ChainError, Fenced, StoreError, StoreFull
from everstep.storage.chain import Chain
from everstep.storage.manifest import CompressorSnapshot
from everstep.storage.memory import MemoryStore
from everstep.storage.store import Buffer, Pace
from everstep.training.base_writer import BaseWriter
from everstep.training.blueprint import Blueprint
from everstep.training.history import gaps
from everstep.training.log_writer import LogWriter
from everstep.training.replica import Replica
from everstep.training.restore import read_residual, restore
from everstep.training.shard_state import to_batches
from tests.unit.training.worlds import Worker, packed, same, solo, toy_recipe, whole_digest


class Refusing(MemoryStore):
    """A store that is full for some names, as long as `full` says so."""

    full: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()  # these are taken, and the answer is lost

    def put(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        if any(part in key for part in self.full):
            raise StoreFull("no space left")
        super().put(key, data)
        if any(part in key for part in self.silent):
            raise StoreError("no answer")


class Logged:
    """A live worker, its replica, and the writer between the replica and a store."""

    def __init__(self, *, segment_steps: int = 3, base_interval: int = 4) -> None:
        self.store = Refusing()
        self.worker = Worker(Blueprint(toy_recipe(norm=True, shards=2)))
        self.blueprint = Blueprint(self.worker.blueprint.recipe)
        shards = self.blueprint.layout.shards
        self.chain = Chain.create(self.store, "r", settings={}, shards=len(shards), exactness="bitwise")
        states = {shard: self.blueprint.shard_state(shard) for shard in shards}
        for shard, state in states.items():
            self.chain.put_base(shard, 0, to_batches(state.state.tensors()))
        self.replica = Replica(states, 1)
        self.digests = {0: self.worker.state.digest()}
        self.bases_writer = BaseWriter(
            self.chain, self.replica, base_interval=base_interval, based=dict.fromkeys(states, 0)
        )
        self.writer = LogWriter(self.chain, self.replica, self.bases_writer, segment_steps=segment_steps, max_lag_s=1e9)

    def train(self, steps: int, *, complete: bool = True) -> None:
        for _ in range(steps):
            result = self.worker.take(solo())
            records = list(packed(result, self.worker.blueprint.layout).items())
            self.replica.put(1, result.lsn, records, result.lsn if complete else 0)
            self.digests[result.lsn] = self.worker.state.digest()

    def work(self, *, flush: bool = False) -> None:
        for _ in range(20):
            if not self.writer.work(flush=flush) and not self.bases_writer.work():
                return
        raise AssertionError("there is always more to write")

    def ranges(self, shard: int = 1) -> list[tuple[int, int]]:
        return [(key.first, key.last) for key in self.chain.listing().segments(shard)]

    def bases(self, shard: int = 1) -> list[int]:
        return [key.lsn for key in self.chain.listing().bases(shard)]

    def durable(self) -> set[int]:
        return set(self.replica.durable().values())

    def check(self, target: int | None = None) -> int:
        states, plan, damage = restore(Chain.open(self.store, "r"), self.blueprint, target=target)
        assert not damage and whole_digest(list(states.values())) == self.digests[plan.target]
        return plan.target


@pytest.fixture
def logged() -> Logged:
    return Logged()


def test_segments_are_written_when_they_are_full(logged: Logged) -> None:
    logged.train(2)
    assert not logged.writer.work(flush=False) and logged.ranges() == [] and logged.durable() == {0}
    logged.train(1)
    assert logged.writer.work(flush=False) and logged.ranges() == [(1, 3)] and logged.durable() == {3}
    assert not logged.writer.work(flush=False)
    assert logged.check() == 3


def test_a_flush_writes_all_that_is_complete_and_no_more(logged: Logged) -> None:
    logged.train(2)
    logged.train(1, complete=False)
    logged.work(flush=True)
    assert logged.ranges() == [(1, 2)] and logged.durable() == {2} and logged.check() == 2
    logged.replica.advance(3)
    logged.work(flush=True)
    assert logged.ranges() == [(1, 2), (3, 3)] and logged.check() == 3


def test_bases_roll_one_shard_a_call_each_in_its_turn(logged: Logged) -> None:
    logged.train(4)
    logged.writer.work(flush=True)
    written = []
    while logged.bases_writer.work():
        written.append(sum(len(logged.bases(shard)) for shard in range(3)))
    assert written == [4, 5, 6]
    assert [logged.bases(shard) for shard in range(3)] == [[0, 4], [0, 4], [0, 2]]
    logged.train(3)
    logged.work(flush=True)
    assert [logged.bases(shard) for shard in range(3)] == [[0, 4], [0, 4], [0, 2, 6]]
    for target in range(8):
        assert logged.check(target) == target


def test_bases_are_proved_and_can_be_named(logged: Logged) -> None:
    logged.train(4)
    logged.work(flush=True)
    assert [(base.shard, base.lsn) for base in logged.bases_writer.proved] == [(0, 4), (1, 4), (2, 2)]
    logged.chain.name_bases(logged.bases_writer.proved)
    named = logged.chain.manifest.bases
    assert [(base.shard, base.lsn, base.round) for base in named] == [(0, 4, 0), (1, 4, 0), (2, 2, 0)]
    version = logged.chain.manifest.version
    logged.chain.name_bases(logged.bases_writer.proved)
    assert logged.chain.manifest.version == version


def test_a_settled_writer_begins_no_more_bases(logged: Logged) -> None:
    logged.train(4)
    logged.writer.work(flush=True)
    logged.bases_writer.settle()
    assert not logged.bases_writer.work() and logged.bases() == [0]


def test_a_base_is_taken_where_the_state_is_if_that_is_later(logged: Logged) -> None:
    logged.train(6)
    with logged.replica.merge_lock:
        logged.replica.merge(1)
    logged.work(flush=True)
    assert [logged.bases(shard) for shard in range(3)] == [[0, 4], [0, 6], [0, 6]]
    logged.train(1)
    logged.work(flush=True)
    assert logged.bases() == [0, 6] and all(logged.check(target) == target for target in range(8))


# --- a store that refuses


def test_a_store_that_refuses_loses_nothing(logged: Logged) -> None:
    logged.train(3)
    logged.store.full = ("/log/",)
    for _ in range(3):
        with pytest.raises(StoreFull):
            logged.writer.work(flush=False)
        assert logged.durable() == {0}
        logged.train(1)
    logged.store.full = ()
    logged.work(flush=True)
    assert logged.durable() == {6} and logged.check() == 6


@pytest.mark.parametrize("grows", [True, False])
def test_a_store_that_refuses_one_shard_takes_it_at_the_next_call(logged: Logged, grows: bool) -> None:
    logged.train(3)
    logged.store.full = ("/log/s0002",)
    with pytest.raises(StoreFull):
        logged.writer.work(flush=False)
    assert logged.durable() == {0} and logged.ranges(1) == [(1, 3)]
    logged.store.full = ()
    logged.train(int(grows))
    logged.work(flush=True)
    assert logged.durable() == {3 + grows} and logged.check() == 3 + grows


def test_a_base_that_is_refused_comes_later(logged: Logged) -> None:
    logged.train(4)
    logged.store.full = ("/base/s0001",)
    with pytest.raises(StoreFull):
        logged.work(flush=True)
    assert logged.durable() == {4}
    logged.store.full = ()
    logged.work(flush=True)
    assert [logged.bases(shard)[-1] for shard in range(3)] == [4, 4, 2]


def test_what_a_fenced_writer_wrote_does_not_become_durable(logged: Logged) -> None:
    logged.train(3)
    logged.work(flush=True)
    Chain.take_over(logged.store, "r", cut="common")
    logged.train(3)
    with pytest.raises(Fenced):
        logged.writer.work(flush=True)
    assert logged.durable() == {3}
    assert logged.check() == 3  # the log of the new generation does not show what came after


def test_a_gap_is_recorded_and_bridged_by_bases(logged: Logged) -> None:
    logged.train(3)
    logged.work(flush=True)
    logged.store.full = ("/log/", "/base/")
    logged.train(3)
    with pytest.raises(StoreFull):
        logged.work(flush=True)
    logged.writer.leave_gap()
    assert set(logged.replica.released().values()) == {6} and logged.durable() == {3}
    logged.train(1)
    with pytest.raises(StoreFull):
        logged.work(flush=True)
    assert logged.durable() == {3}
    logged.store.full = ()
    logged.train(1)
    logged.work(flush=True)
    assert logged.durable() == {8} and logged.bases()[-1] == 8
    assert [(body["first"], body["last"]) for body in gaps(logged.chain.events())] == [(4, 8)]
    logged.train(3)
    logged.work(flush=True)
    assert logged.check() == 11
    for target in (2, 3, 8, 9, 10):
        assert logged.check(target) == target
    for target in (4, 7):
        with pytest.raises(ChainError):
            restore(logged.chain, logged.blueprint, target=target)


def test_a_segment_that_arrived_without_an_answer_is_no_part_of_the_gap(logged: Logged) -> None:
    logged.train(3)
    logged.work(flush=True)
    logged.store.silent = ("/log/s0002/",)
    logged.train(2)
    with pytest.raises(StoreError):
        logged.work(flush=True)
    logged.writer.leave_gap()
    logged.store.silent = ()
    logged.train(2)
    logged.work(flush=True)
    (gap,) = gaps(logged.chain.events())
    assert (gap["first"], gap["last"]) == (6, 7)
    assert logged.check(5) == 5 and logged.check() == 7
    with pytest.raises(ChainError):
        restore(logged.chain, logged.blueprint, target=6)


# --- compressor snapshots


def test_slices_of_a_snapshot_are_written_one_by_one(logged: Logged) -> None:
    parts: dict[int, Any] = {0: torch.randn(5), 1: torch.randn(3)}
    for number, part in parts.items():
        logged.writer.take_residual(4, number, 2, pa.py_buffer(part.numpy().tobytes()))
    logged.store.full = ("/comp/",)
    with pytest.raises(StoreFull):
        logged.writer.work(flush=False)
    assert logged.writer.slices == {}
    logged.store.full = ()
    assert logged.writer.work(flush=False) and logged.writer.slices == {(4, 2): {0}}
    logged.work()
    assert logged.writer.slices == {(4, 2): {0, 1}}
    assert same(read_residual(logged.chain, CompressorSnapshot(1, 4, 2)), parts)
