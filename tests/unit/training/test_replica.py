"""The replica: what it takes, what it refuses, what it writes, and that laziness changes no bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pyarrow as pa
import pytest
import torch

from everstep.core.errors import StateMismatch
from everstep.training import replica as replica_module
from everstep.training.blueprint import Blueprint
from everstep.training.record import StepResult, lsn_of, pack, payload_crc, unpack
from everstep.training.replica import Replica
from tests.unit.training.worlds import Worker, packed, solo, toy_recipe, whole_digest

STEPS = 6


@dataclasses.dataclass
class Live:
    """A run of a few steps: its records by lsn and shard, and the digest after each step."""

    blueprint: Blueprint
    records: dict[int, dict[int, pa.Buffer]]
    digests: dict[int, str]
    results: dict[int, StepResult]

    @property
    def shards(self) -> range:
        return self.blueprint.layout.shards

    def all_of(self, lsn: int) -> list[tuple[int, pa.Buffer]]:
        return list(self.records[lsn].items())


def copied(result: StepResult) -> StepResult:
    """A dense delta lies in a buffer that is used again."""
    assert result.delta is not None
    return dataclasses.replace(result, delta=dataclasses.replace(result.delta, values=result.delta.values.copy()))


@pytest.fixture(scope="module")
def live() -> Live:
    worker = Worker(Blueprint(toy_recipe(norm=True, shards=2)))
    records, digests, results = {}, {0: worker.state.digest()}, {}
    for lsn in range(1, STEPS + 1):
        results[lsn] = copied(worker.take(solo()))
        records[lsn] = packed(results[lsn], worker.blueprint.layout)
        digests[lsn] = worker.state.digest()
    return Live(Blueprint(worker.blueprint.recipe), records, digests, results)


@pytest.fixture
def replica(live: Live) -> Replica:
    return Replica({shard: live.blueprint.shard_state(shard) for shard in live.shards}, group_epoch=1)


def merge_all(replica: Replica, upto: int | None = None) -> str:
    with replica.merge_lock:
        return whole_digest([replica.merge(shard, upto) for shard in replica.states])


def feed(replica: Replica, live: Live, steps: Any, epoch: int = 1, complete: int = 0) -> None:
    for lsn in steps:
        assert replica.put(epoch, lsn, live.all_of(lsn), complete)


def every(shards: Any, value: int) -> dict[int, int]:
    return dict.fromkeys(shards, value)


# --- taking records


def test_records_are_taken_in_order(replica: Replica, live: Live) -> None:
    feed(replica, live, (1, 2, 3))
    assert replica.received() == every(live.shards, 3)
    assert replica.durable() == replica.merged() == every(live.shards, 0)
    assert replica.complete == 0 and replica.held_bytes() > 0


def test_a_gap_is_left_for_the_sender_to_fill(replica: Replica, live: Live) -> None:
    feed(replica, live, (1,))
    assert replica.put(1, 3, live.all_of(3), 0)
    assert replica.received() == every(live.shards, 1)
    feed(replica, live, (2, 3))
    assert replica.received() == every(live.shards, 3)
    replica.advance(3)
    assert merge_all(replica) == live.digests[3]


def test_shards_come_each_at_their_own_pace(replica: Replica, live: Live) -> None:
    replica.put(1, 1, [(0, live.records[1][0]), (2, live.records[1][2])], 0)
    replica.put(1, 2, [(2, live.records[2][2])], 1)
    assert replica.received() == {0: 1, 1: 0, 2: 2}
    replica.advance(2)
    assert replica.complete == 0  # no further than the slowest of our own
    replica.put(1, 1, [(1, live.records[1][1])], 5)
    assert replica.complete == 1


def test_a_record_that_comes_twice_changes_nothing(replica: Replica, live: Live) -> None:
    feed(replica, live, (1, 2, 1, 2, 2), complete=2)
    held = replica.held_bytes()
    feed(replica, live, (1, 2), complete=2)
    assert replica.held_bytes() == held and replica.received() == every(live.shards, 2)
    assert merge_all(replica) == live.digests[2]
    feed(replica, live, (1, 2, 3), complete=3)
    assert merge_all(replica) == live.digests[3]
    assert [lsn_of(b) for cut in replica.cut(1, 0) for b in cut.batches] == [1, 2, 3] * 3
    assert replica.mismatch is None


def test_an_ended_epoch_is_refused(replica: Replica, live: Live) -> None:
    feed(replica, live, (1,))
    assert replica.begin_epoch(3)
    assert not replica.put(1, 2, live.all_of(2), 1) and not replica.put(2, 2, live.all_of(2), 1)
    assert replica.received() == every(live.shards, 1) and replica.complete == 0
    assert replica.put(3, 2, live.all_of(2), 1)
    assert replica.begin_epoch(3) and not replica.begin_epoch(2)
    assert replica.group_epoch == 3 and replica.received() == every(live.shards, 2)


# --- provisional records


def test_what_is_provisional_is_not_merged_and_not_cut(replica: Replica, live: Live) -> None:
    feed(replica, live, range(1, 5), complete=2)
    assert merge_all(replica) == merge_all(replica, 4) == live.digests[2]
    assert replica.merged() == every(live.shards, 2)
    for cuts in (replica.cut(1, 0.0), replica.cut(1, 0.0, all_of_it=True)):
        assert [(cut.shard, cut.first, cut.last) for cut in cuts] == [(shard, 1, 2) for shard in live.shards]
    replica.advance(3)
    assert merge_all(replica) == live.digests[3]
    replica.advance(1)
    assert replica.complete == 3  # it never goes back
    replica.advance(99)
    assert replica.complete == 4


def test_a_new_epoch_drops_what_is_provisional_above_what_it_keeps(replica: Replica, live: Live) -> None:
    feed(replica, live, range(1, 6), complete=2)
    assert replica.begin_epoch(2, keep=4)
    assert replica.received() == every(live.shards, 4)
    assert replica.begin_epoch(3, keep=1)  # complete records stay, whatever is asked for
    assert replica.received() == every(live.shards, 2)
    assert replica.begin_epoch(4, keep=None) and replica.received() == every(live.shards, 2)
    feed(replica, live, (3,), epoch=4, complete=3)
    assert merge_all(replica) == live.digests[3]


def other_step(live: Live, lsn: int) -> tuple[dict[int, pa.Buffer], str]:
    """The records and digest of a step at `lsn` that differs from the logged one: its batches were others."""
    worker = Worker(Blueprint(live.blueprint.recipe), epoch=2)
    for _ in range(lsn - 1):
        worker.take(solo())
    usual = worker.batches
    worker.batches = lambda step, micro_shard: usual(step + 100, micro_shard)
    return packed(worker.take(solo()), worker.blueprint.layout), worker.state.digest()


def test_a_provisional_record_is_replaced_by_that_of_a_newer_epoch(replica: Replica, live: Live) -> None:
    feed(replica, live, range(1, 4), complete=2)
    records, digest = other_step(live, 3)
    assert replica.begin_epoch(2, keep=2)
    assert replica.put(2, 3, list(records.items()), 3)
    assert merge_all(replica) == digest != live.digests[3]
    for cut in replica.cut(1, 0.0, all_of_it=True):
        assert [b.column("group_epoch")[0].as_py() for b in cut.batches] == [1, 1, 2]
        assert payload_crc(cut.batches[-1]) == payload_crc(unpack(cut.shard, records[cut.shard]))


# --- cutting


def test_a_cut_is_due_by_steps_by_age_or_when_all_is_wanted(
    replica: Replica, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(replica_module.clock, "monotonic", lambda: now[0])
    assert replica.cut(1, 0.0, all_of_it=True) == []
    feed(replica, live, (1, 2), complete=2)
    now[0] = 104.0
    feed(replica, live, (3,), complete=2)
    assert replica.cut(3, 5.0) == []  # two complete ones, four seconds old
    assert [(cut.first, cut.last) for cut in replica.cut(2, 5.0)] == [(1, 2)] * 3
    assert [(cut.first, cut.last) for cut in replica.cut(9, 4.0)] == [(1, 2)] * 3
    assert [(cut.first, cut.last) for cut in replica.cut(9, 99.0, all_of_it=True)] == [(1, 2)] * 3
    now[0] = 105.0
    replica.advance(3)
    assert [(cut.first, cut.last) for cut in replica.cut(9, 5.0)] == [(1, 3)] * 3


def test_what_was_written_is_durable_and_not_cut_again(replica: Replica, live: Live) -> None:
    feed(replica, live, (1, 2, 3), complete=2)
    first, *rest = replica.cut(1, 0.0)
    replica.written(first.shard, first.last)
    assert replica.durable() == {first.shard: 2} | every([cut.shard for cut in rest], 0)
    assert [cut.shard for cut in replica.cut(1, 0.0)] == [cut.shard for cut in rest]
    for cut in rest:
        replica.written(cut.shard, cut.last)
    assert replica.cut(1, 0.0, all_of_it=True) == []
    replica.advance(3)
    assert [(cut.first, cut.last) for cut in replica.cut(1, 0.0)] == [(3, 3)] * 3
    assert merge_all(replica) == live.digests[3]  # writing takes nothing away from merging


def test_records_that_arrive_while_a_cut_is_written_stay(replica: Replica, live: Live) -> None:
    feed(replica, live, (1, 2), complete=2)
    cuts = replica.cut(1, 0.0)
    feed(replica, live, (3, 4), complete=4)
    for cut in cuts:
        replica.written(cut.shard, cut.last)
    assert [(cut.first, cut.last) for cut in replica.cut(1, 0.0)] == [(3, 4)] * 3


def test_records_that_are_given_up_are_released_and_stay_in_the_state(replica: Replica, live: Live) -> None:
    feed(replica, live, range(1, 5), complete=3)
    assert replica.released() == every(live.shards, 0)
    replica.written(1, 1)
    assert replica.released() == every(live.shards, 0) | {1: 1}
    replica.forget_unwritten()
    assert replica.cut(1, 0.0, all_of_it=True) == []
    assert replica.released() == every(live.shards, 3) and replica.durable() == every(live.shards, 0) | {1: 1}
    assert merge_all(replica) == live.digests[3]
    replica.advance(4)
    assert [(cut.first, cut.last) for cut in replica.cut(1, 0.0)] == [(4, 4)] * 3


def test_merging_first_leaves_everything_to_be_written(replica: Replica, live: Live) -> None:
    feed(replica, live, (1, 2, 3), complete=3)
    merge_all(replica)
    assert replica.held_bytes() == 0
    assert [(cut.first, cut.last) for cut in replica.cut(1, 0.0)] == [(1, 3)] * 3


# --- merging


def test_lazy_merging_gives_the_bits_of_eager_merging(live: Live) -> None:
    lazy, eager = (Replica({s: live.blueprint.shard_state(s) for s in live.shards}, 1) for _ in range(2))
    for lsn in range(1, STEPS + 1):
        feed(lazy, live, (lsn,), complete=lsn)
        feed(eager, live, (lsn,), complete=lsn)
        assert merge_all(eager) == live.digests[lsn]
    assert merge_all(lazy, 2) == live.digests[2] and merge_all(lazy, 5) == live.digests[5]
    assert merge_all(lazy, 3) == live.digests[5]  # never back
    assert merge_all(lazy) == merge_all(eager) == live.digests[STEPS]


def test_a_mismatch_met_while_merging_is_kept(live: Live) -> None:
    worker = Worker(Blueprint(toy_recipe(digest_every=2)), owned=(0, 1, 2))
    states = {s: worker.blueprint.shard_state(s) for s in worker.blueprint.layout.shards}
    with torch.no_grad():
        next(iter(states[1].state.params.values())).add_(1)
    replica = Replica(states, 1)
    for lsn in (1, 2):
        replica.put(1, lsn, list(packed(worker.take(solo()), worker.blueprint.layout).items()), lsn)
    with replica.merge_lock, pytest.raises(StateMismatch, match="shard 1"):
        replica.merge(1)
    assert isinstance(replica.mismatch, StateMismatch)


# --- recomputed records


def test_a_recomputed_record_that_is_equal_is_accepted(replica: Replica, live: Live) -> None:
    feed(replica, live, range(1, 5), complete=4)
    for shard in live.shards:
        logged = {lsn: payload_crc(unpack(shard, live.records[lsn][shard])) for lsn in (2, 3)}
        replica.expect(shard, logged)
    assert replica.begin_epoch(2)
    feed(replica, live, (2, 3, 4), epoch=2)
    assert replica.mismatch is None


@pytest.mark.parametrize("merged", [False, True])
def test_a_recomputed_record_that_differs_is_found(replica: Replica, live: Live, merged: bool) -> None:
    feed(replica, live, range(1, 5), complete=4)
    if merged:
        merge_all(replica)
    for shard in live.shards:
        written = {lsn: payload_crc(unpack(shard, live.records[lsn][shard])) for lsn in (2, 3)} if merged else {}
        replica.expect(shard, written)
    records, _ = other_step(live, 3)
    feed(replica, live, (2,))
    assert replica.mismatch is None
    replica.put(1, 3, [(1, records[1])], 0)
    assert isinstance(replica.mismatch, StateMismatch)
    assert "step 3, shard 1" in replica.mismatch.message and "without --exact" in replica.mismatch.hint
    first = replica.mismatch
    replica.put(1, 3, [(2, records[2])], 0)
    assert replica.mismatch is first


def test_records_are_compared_only_when_that_is_asked_for(replica: Replica, live: Live) -> None:
    feed(replica, live, range(1, 4), complete=3)
    records, _ = other_step(live, 3)
    replica.put(1, 3, list(records.items()), 3)
    assert replica.mismatch is None
    assert merge_all(replica) == live.digests[3]


def test_a_record_that_was_dropped_is_not_what_its_successor_must_match(replica: Replica, live: Live) -> None:
    """What a newer epoch put in its place is sent twice: the second must match the first, not the dropped one."""
    feed(replica, live, range(1, 4), complete=2)
    for shard in live.shards:
        replica.expect(shard, {})
    records, digest = other_step(live, 3)
    assert replica.begin_epoch(2, keep=2)
    for _ in range(2):
        assert replica.put(2, 3, list(records.items()), 3)
    assert replica.mismatch is None
    assert merge_all(replica) == digest


# --- starting again


def test_a_shard_starts_again_from_a_state_taken_elsewhere(replica: Replica, live: Live) -> None:
    feed(replica, live, (1, 2), complete=2)
    ahead = Replica({s: live.blueprint.shard_state(s) for s in live.shards}, 1)
    feed(ahead, live, range(1, 5), complete=4)
    merge_all(ahead)
    for shard in live.shards:
        replica.rebase(shard, ahead.states[shard])
    assert replica.received() == replica.durable() == replica.merged() == every(live.shards, 4)
    assert replica.complete == 4 and replica.held_bytes() == 0 and replica.cut(1, 0.0, all_of_it=True) == []
    feed(replica, live, (5, 6), complete=6)
    assert merge_all(replica) == live.digests[6]


def test_long_segments_are_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from everstep.training import replica as module

    batches = [pa.record_batch({"x": pa.array([0] * n, pa.int64())}) for n in (1, 1, 5, 1, 1, 1)]
    monkeypatch.setattr(module, "CUT_BYTES", 3 * 8)
    pieces = [(cut.first, cut.last, len(cut.batches)) for cut in module._pieces(2, batches, 7)]
    assert pieces == [(7, 8, 2), (9, 9, 1), (10, 12, 3)]
    assert module._pieces(2, [], 0) == []


# --- lending records to whoever catches up


def lsns(batches: list[pa.RecordBatch] | None) -> list[int] | None:
    return None if batches is None else [lsn_of(batch) for batch in batches]


def test_records_are_held_until_they_are_merged(replica: Replica, live: Live) -> None:
    feed(replica, live, (1, 2, 3, 4), complete=4)
    assert lsns(replica.held(1, 1, 3)) == [2, 3]
    assert lsns(replica.held(1, 3, 3)) == []
    merge_all(replica, 2)
    assert lsns(replica.held(1, 2, 4)) == [3, 4]
    assert replica.held(1, 1, 4) is None  # 2 is merged


def test_lent_records_are_held_after_they_are_merged(replica: Replica, live: Live) -> None:
    feed(replica, live, (1, 2), complete=2)
    merge_all(replica)
    replica.lend(60.0)
    feed(replica, live, (3, 4, 5), complete=5)
    merge_all(replica, 4)
    assert lsns(replica.held(1, 2, 5)) == [3, 4, 5]
    assert replica.held(1, 1, 5) is None
    replica.lend(-1.0)  # nobody catches up any more
    merge_all(replica)
    assert replica.held(1, 2, 5) is None and replica.held_bytes() == 0


def test_a_borrower_comes_to_the_same_state(replica: Replica, live: Live) -> None:
    feed(replica, live, (1, 2), complete=2)
    merge_all(replica)
    replica.lend(60.0)
    borrower = {}
    for shard, state in replica.states.items():
        borrower[shard] = live.blueprint.shard_state(shard, blank=True)
        borrower[shard].state.load(state.state.tensors(), state.lsn)
    feed(replica, live, range(3, STEPS + 1), complete=STEPS)
    merge_all(replica, 4)
    for shard, state in borrower.items():
        for batch in replica.held(shard, state.lsn, STEPS) or ():
            state.merge(batch)
    assert whole_digest(list(borrower.values())) == live.digests[STEPS]


def test_a_merge_goes_no_further_than_asked_while_steps_go_on(replica: Replica, live: Live) -> None:
    """A state that is called that of step 3 is, although the complete lsn grows while it is made."""
    feed(replica, live, (1, 2, 3), complete=3)
    lsn = replica.complete
    feed(replica, live, (4, 5), complete=5)
    assert merge_all(replica, lsn) == live.digests[3]


# --- values that come before their record


def apart(live: Live, lsn: int) -> tuple[list[tuple[int, pa.Buffer]], dict[int, pa.Buffer]]:
    """A step's records without their dense values, and those."""
    result, layout = live.results[lsn], live.blueprint.layout
    assert result.delta is not None
    values = {span.shard: pa.py_buffer(result.delta.part(span).values.tobytes()) for span in layout.ranges}
    return [(shard, pack(result, layout, shard, apart=True)) for shard in live.shards], values


def test_values_may_come_before_their_record(live: Live, replica: Replica) -> None:
    for lsn in range(1, STEPS + 1):
        records, values = apart(live, lsn)
        for shard, early in values.items():
            replica.hold(1, lsn, shard, early)
        assert set(replica.received().values()) == {lsn - 1}  # nothing counts yet
        assert replica.put(1, lsn, records, lsn)
        for shard, payload in live.records[lsn].items():
            held = replica.held(shard, lsn - 1, lsn)
            assert held is not None and held[0].equals(unpack(shard, payload))
    assert merge_all(replica) == live.digests[STEPS]


def test_values_of_an_aborted_step_leave_no_trace(live: Live, replica: Replica) -> None:
    wrong = {shard: pa.py_buffer(bytes(values.size)) for shard, values in apart(live, 1)[1].items()}
    for shard, early in wrong.items():
        replica.hold(1, 1, shard, early)
    replica.begin_epoch(2, 0)
    for shard, early in wrong.items():
        replica.hold(1, 1, shard, early)  # from a worker that was stopped, and wakes
    assert replica.put(2, 1, live.all_of(1), 1) and merge_all(replica) == live.digests[1]
    for shard, early in wrong.items():
        replica.hold(2, 2, shard, early)
    records, values = apart(live, 2)  # taken again in the same epoch
    for shard, early in values.items():
        replica.hold(2, 2, shard, early)
    assert replica.put(2, 2, records, 2) and merge_all(replica) == live.digests[2]


def test_values_of_a_later_step_wait_while_an_earlier_record_comes_again(live: Live, replica: Replica) -> None:
    feed(replica, live, [1])
    records, values = apart(live, 2)
    for shard, early in values.items():
        replica.hold(1, 2, shard, early)
    feed(replica, live, [1])
    assert replica.put(1, 2, records, 2) and merge_all(replica) == live.digests[2]
