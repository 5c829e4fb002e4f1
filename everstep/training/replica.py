"""The replica: a checkpoint actor's copy of its shards, the last merged state plus the records it holds.

Records arrive in order, shard by shard. Those above the complete lsn are provisional: never merged, never written,
replaced by the same lsn from a newer group epoch. Merging is lazy; whoever needs the state asks for it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from everstep.core import clock
from everstep.core.errors import StateMismatch
from everstep.training.record import lsn_of, payload_crc, unpack
from everstep.training.shard_state import ShardState

CUT_BYTES = 64 << 20  # the longest segment of several records: one request to an object store
BACKLOG_BYTES = 256 << 20  # of unmerged records; a longer backlog is merged without being asked for


@dataclass
class ShardLog:
    """What is held of one shard's records.

    Attributes:
        received: the last lsn that is here.
        durable: the last lsn that is in the store.
        unmerged: records above the merged lsn, by lsn.
        released: the last lsn that nobody needs to keep for this log any more: durable, or given up.
        unwritten: records above the last cut, in order, with their time of arrival.
        bytes: of `unmerged`.
        logged: checksums of records that a recomputation must match, by lsn.
        lent: merged records that are kept for somebody who catches up, by lsn.
    """

    received: int
    durable: int
    released: int = -1
    unmerged: dict[int, pa.RecordBatch] = field(default_factory=dict)
    unwritten: list[tuple[int, pa.RecordBatch, float]] = field(default_factory=list)
    bytes: int = 0
    logged: dict[int, int] = field(default_factory=dict)
    lent: dict[int, pa.RecordBatch] = field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    """Consecutive records of one shard, ready to become a segment."""

    shard: int
    first: int
    last: int
    batches: tuple[pa.RecordBatch, ...]


def _pieces(shard: int, batches: Sequence[pa.RecordBatch], first: int) -> list[Cut]:
    out: list[Cut] = []
    size = CUT_BYTES
    for lsn, batch in enumerate(batches, start=first):
        size += batch.nbytes
        if out and size <= CUT_BYTES:
            out[-1] = Cut(shard, out[-1].first, lsn, (*out[-1].batches, batch))
        else:
            out.append(Cut(shard, lsn, lsn, (batch,)))
            size = batch.nbytes
    return out


class Replica:
    """Shard states and their records. Thread safe: receiving never waits for merging.

    Args:
        states: the owned shards' states, as restored.
        group_epoch: messages of older epochs are refused.
    """

    def __init__(self, states: Mapping[int, ShardState], group_epoch: int) -> None:
        self.states = dict(states)
        self.logs = {shard: ShardLog(state.lsn, state.lsn) for shard, state in states.items()}
        self.group_epoch = group_epoch
        self.complete = min(log.received for log in self.logs.values())
        self.mismatch: StateMismatch | None = None
        self.merge_lock = threading.Lock()
        self._replay_s: dict[int, float] = {}
        self._lend_until = 0.0
        self._early: dict[int, tuple[int, pa.Buffer]] = {}  # by shard: values of a step under way, and that step
        self._lock = threading.Lock()

    def received(self) -> dict[int, int]:
        """Return, by shard, the last lsn that is here."""
        return {shard: log.received for shard, log in self.logs.items()}

    def durable(self) -> dict[int, int]:
        """Return, by shard, the last lsn that is in the store."""
        return {shard: log.durable for shard, log in self.logs.items()}

    def released(self) -> dict[int, int]:
        """Return, by shard, the last lsn that workers need not keep any more."""
        return {shard: max(log.durable, log.released) for shard, log in self.logs.items()}

    def merged(self) -> dict[int, int]:
        """Return, by shard, the last merged lsn."""
        return {shard: state.lsn for shard, state in self.states.items()}

    def held_bytes(self) -> int:
        """Return the bytes of records that are not merged."""
        return sum(log.bytes for log in self.logs.values())

    def begin_epoch(self, group_epoch: int, keep: int | None = None) -> bool:
        """Refuse older epochs from now on, and drop provisional records above `keep`; False if we are past it."""
        with self._lock:
            if group_epoch < self.group_epoch:
                return False
            if group_epoch > self.group_epoch:
                self._early.clear()
            self.group_epoch = group_epoch
            if keep is not None:
                for log in self.logs.values():
                    self._drop_above(log, max(keep, self.complete))
        return True

    def hold(self, group_epoch: int, lsn: int, shard: int, values: pa.Buffer) -> None:
        """Take the dense values of a step that is still being taken; its record makes them count, or nothing does."""
        with self._lock:
            if group_epoch >= self.group_epoch:
                self._early[shard] = (lsn, values)

    def put(self, group_epoch: int, lsn: int, records: Sequence[tuple[int, pa.Buffer]], complete: int) -> bool:
        """Take records of one step; False if they come from an ended group epoch. A gap is left to the sender."""
        with self._lock:
            if group_epoch < self.group_epoch:
                return False
            for shard, payload in records:
                early = self._early.pop(shard) if self._early.get(shard, (0,))[0] == lsn else None
                self._take(shard, lsn, payload, early[1] if early else None)
        self.advance(complete)
        return True

    def advance(self, complete: int) -> None:
        """Learn that every shard's checkpoint actor has acknowledged up to `complete`."""
        with self._lock:
            limit = min(log.received for log in self.logs.values())
            self.complete = max(self.complete, min(complete, limit))

    def cut(self, steps: int, age_s: float, *, all_of_it: bool = False) -> list[Cut]:
        """Return what is due to be written: complete records, at least `steps` of them or `age_s` old, by shard.

        Many bytes are due at once, and none of the pieces is longer than `CUT_BYTES` unless a single record is.
        """
        now, out = clock.monotonic(), []
        with self._lock:
            for shard, log in self.logs.items():
                ready = [item for item in log.unwritten if item[0] <= self.complete]
                pieces = _pieces(shard, [batch for _, batch, _ in ready], ready[0][0] if ready else 0)
                old = ready and now - ready[0][2] >= age_s
                if all_of_it or len(ready) >= steps or old or len(pieces) > 1:
                    out += pieces
        return out

    def written(self, shard: int, last: int) -> None:
        """Note that a shard is durable up to `last`."""
        with self._lock:
            log = self.logs[shard]
            log.unwritten = [item for item in log.unwritten if item[0] > last]
            log.durable = max(log.durable, last)

    def forget_unwritten(self) -> None:
        """Give up writing what is complete; it stays in the state, by merging."""
        with self._lock:
            for log in self.logs.values():
                log.unwritten = [item for item in log.unwritten if item[0] > self.complete]
                log.released = max(log.released, self.complete)

    def merge(self, shard: int, upto: int | None = None) -> ShardState:
        """Bring one shard to `upto` (None: the complete lsn) and return its state. Call with `merge_lock` held."""
        state, log, first = self.states[shard], self.logs[shard], self.states[shard].lsn
        began = clock.thread_cpu()
        limit = self.complete if upto is None else min(upto, self.complete)
        while state.lsn < limit:
            with self._lock:
                batch = log.unmerged.pop(state.lsn + 1)
                log.bytes -= batch.nbytes
                self._lend(log, state.lsn + 1, batch)
            try:
                state.merge(batch)
            except StateMismatch as error:
                self.mismatch = error
                raise
        if state.lsn > first:
            self._replay_s[shard] = (clock.thread_cpu() - began) / (state.lsn - first)
        return state

    def lend(self, seconds: float) -> None:
        """Keep records for so long after they are merged: somebody takes the state now and the records after it."""
        self._lend_until = clock.monotonic() + seconds

    def held(self, shard: int, after: int, upto: int) -> list[pa.RecordBatch] | None:
        """Return the records of a shard from `after` + 1 to `upto`, in order; None if some are here no more."""
        with self._lock:
            held = self.logs[shard].lent | self.logs[shard].unmerged
            wanted = range(after + 1, upto + 1)
            return [held[lsn] for lsn in wanted] if all(lsn in held for lsn in wanted) else None

    def replay_s(self) -> float:
        """Return the processor seconds that merging one step of all shards took of late; 0 before any was."""
        return sum(self._replay_s.values())

    def merge_backlog(self) -> bool:
        """Merge the next step of every shard if much is held that nobody has asked for; return whether it was so."""
        if self.held_bytes() <= BACKLOG_BYTES:
            return False
        with self.merge_lock:
            before = self.merged()
            return any([self.merge(shard, lsn + 1).lsn > lsn for shard, lsn in before.items()])

    def expect(self, shard: int, logged: Mapping[int, int]) -> None:
        """Compare recomputed records with these checksums from now on."""
        with self._lock:
            log = self.logs[shard]
            log.logged = {lsn: payload_crc(batch) for lsn, batch in log.unmerged.items()} | dict(logged)

    def rebase(self, shard: int, state: ShardState) -> None:
        """Start a shard again from a state taken elsewhere; what was held of it is dropped."""
        with self.merge_lock, self._lock:
            self.states[shard] = state
            self.logs[shard] = ShardLog(state.lsn, state.lsn)
            self.complete = max(self.complete, min(log.received for log in self.logs.values()))

    def _lend(self, log: ShardLog, lsn: int, batch: pa.RecordBatch) -> None:
        """Keep a merged record while it is lent, within the bytes of a backlog; drop all of them after that."""
        if clock.monotonic() > self._lend_until or sum(b.nbytes for b in log.lent.values()) > BACKLOG_BYTES:
            log.lent = {}
        else:
            log.lent[lsn] = batch

    def _take(self, shard: int, lsn: int, payload: pa.Buffer, values: pa.Buffer | None) -> None:
        log = self.logs[shard]
        if lsn <= log.received:
            self._compare(shard, log, lsn, unpack(shard, payload, values))
        elif lsn == log.received + 1:
            batch = unpack(shard, payload, values)
            assert lsn_of(batch) == lsn
            log.unmerged[lsn] = batch
            log.bytes += batch.nbytes
            log.unwritten.append((lsn, batch, clock.monotonic()))
            log.received = lsn

    def _compare(self, shard: int, log: ShardLog, lsn: int, batch: pa.RecordBatch) -> None:
        expected = log.logged.pop(lsn, None)
        if expected is not None and payload_crc(batch) != expected and self.mismatch is None:
            self.mismatch = StateMismatch(
                f"step {lsn}, shard {shard}: the recomputed record differs from the logged one",
                hint="machine, torch version or data differ from those that wrote the log; "
                "`everstep resume RUN` without --exact goes on from the last durable step (warm)",
            )

    @staticmethod
    def _drop_above(log: ShardLog, keep: int) -> None:
        log.unmerged = {lsn: batch for lsn, batch in log.unmerged.items() if lsn <= keep}
        log.bytes = sum(batch.nbytes for batch in log.unmerged.values())
        log.unwritten = [item for item in log.unwritten if item[0] <= keep]
        log.logged = {lsn: crc for lsn, crc in log.logged.items() if lsn <= keep}
        log.received = min(log.received, keep)
