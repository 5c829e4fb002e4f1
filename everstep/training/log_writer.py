"""Writing a replica's shards into the store: segments, bases and compressor snapshots, a little at a time.

One call of `work` writes what is due now. A store that refuses raises `StoreError` and loses nothing: the same is due
at the next call. Records count as durable only after a look that finds no newer generation.
"""

from __future__ import annotations

import threading
from collections import deque

import pyarrow as pa
import torch

from everstep.storage.chain import Chain
from everstep.training.replica import Replica
from everstep.training.shard_state import to_batches

MERGE_BYTES = 256 << 20  # of unmerged records; a longer backlog is merged without being asked for


class LogWriter:
    """Writes one checkpoint actor's part of the log.

    Args:
        chain: the log, in this writer's generation.
        replica: what to write.
        segment_steps: steps a segment.
        base_interval: steps between two bases of a shard.
        max_lag_s: how old a complete record may get before it is written.
        based: by shard, the lsn of its newest base.
    """

    def __init__(
        self,
        chain: Chain,
        replica: Replica,
        *,
        segment_steps: int,
        base_interval: int,
        max_lag_s: float,
        based: dict[int, int],
    ) -> None:
        self.chain, self.replica = chain, replica
        self.segment_steps, self.base_interval, self.max_lag_s = segment_steps, base_interval, max_lag_s
        self.slices: dict[int, set[int]] = {}  # stored slices of compressor snapshots, by lsn
        self._based = based
        self._gap = False
        self._residuals: deque[tuple[int, int, pa.Buffer]] = deque()
        self._lock = threading.Lock()

    def take_residual(self, lsn: int, number: int, data: pa.Buffer) -> None:
        """Keep one slice of a compressor snapshot (fp32) until it is written."""
        with self._lock:
            self._residuals.append((lsn, number, data))

    def waiting(self) -> bool:
        """Whether anything complete is not written yet."""
        behind = min(self.replica.durable().values()) < self.replica.complete
        return behind or bool(self._residuals)

    def work(self, *, flush: bool) -> bool:
        """Write what is due, everything that is complete if `flush`; return whether there was anything.

        Raises:
            StoreError: the store refused; nothing is lost.
            Fenced: a newer generation owns the log.
            StateMismatch: merging did not lead to the logged state.
        """
        if self._gap:
            self._bridge_gap()
        return self._write_segments(flush) | self._write_residual() | self._write_base()

    def leave_gap(self) -> None:
        """Give up the records that the store would not take; the log goes on with bases once it answers."""
        self.replica.forget_unwritten()
        self._gap = True

    def _write_segments(self, flush: bool) -> bool:
        cuts = self.replica.cut(self.segment_steps, self.max_lag_s, all_of_it=flush)
        for cut in cuts:
            self.chain.put_segment(cut.shard, cut.first, cut.last, cut.batches)
        if cuts:
            self.chain.check_tenure()
        for cut in cuts:
            self.replica.written(cut.shard, cut.last)
        return bool(cuts)

    def _write_residual(self) -> bool:
        if not self._residuals:
            return False
        lsn, number, data = self._residuals[0]
        tensor = torch.frombuffer(bytearray(data), dtype=torch.float32)
        self.chain.put_compressor(lsn, number, to_batches({"residual": tensor}), {})
        self.slices.setdefault(lsn, set()).add(number)
        with self._lock:
            self._residuals.popleft()
        return True

    def _write_base(self) -> bool:
        """Write the base of one shard, if one is due: one at a time, so that the cost is a steady trickle.

        Only where the segments have come as well: a base ahead of them would leave a hole behind a takeover.
        """
        for shard, durable in self.replica.durable().items():
            target = durable // self.base_interval * self.base_interval
            if self._based[shard] < target and self.replica.merged()[shard] <= durable:
                self._put_base(shard, target)
                return True
        if self.replica.held_bytes() > MERGE_BYTES:
            with self.replica.merge_lock:
                for shard in self._based:
                    self.replica.merge(shard)
        return False

    def _put_base(self, shard: int, upto: int) -> int:
        """Write a shard's state at `upto`, or wherever it has been merged to already; return the lsn."""
        with self.replica.merge_lock:
            state = self.replica.merge(shard, upto)
            self.chain.put_base(shard, state.lsn, to_batches(state.state.tensors()))
            self._based[shard] = state.lsn
            return state.lsn

    def _bridge_gap(self) -> None:
        first = min(self.replica.durable().values()) + 1
        complete = self.replica.complete
        reached = {shard: self._put_base(shard, complete) for shard in self._based}
        self.chain.check_tenure()
        for shard, lsn in reached.items():
            self.replica.written(shard, lsn)
        body = {"first": first, "last": max(reached.values()), "reason": "the store refused for too long"}
        self.chain.add_event(f"gap-{max(reached.values()):012d}", body)
        self._gap = False
