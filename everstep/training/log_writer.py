"""Writing a replica's records into the store: segments and compressor snapshots, a little at a time.

One call of `work` writes what is due now. A store that refuses raises `StoreError` and loses nothing: the same is due
at the next call. Records count as durable only after a look that finds no newer generation.
"""

from __future__ import annotations

import threading
from collections import deque

import pyarrow as pa
import torch

from everstep.core import clock
from everstep.storage.chain import Chain
from everstep.storage.plan import reach_from
from everstep.training.base_writer import BaseWriter
from everstep.training.record import joined
from everstep.training.replica import Replica
from everstep.training.shard_state import to_batches

RESERVE = 0.8  # of the allowed lag; the rest is for a machine that is busy


class LogWriter:
    """Writes one checkpoint actor's part of the log.

    Args:
        chain: the log, in this writer's generation.
        replica: what to write.
        bases: writes bases where the log has a gap.
        segment_steps: steps a segment.
        max_lag_s: how old a complete record may get until it is durable.
    """

    def __init__(
        self,
        chain: Chain,
        replica: Replica,
        bases: BaseWriter,
        *,
        segment_steps: int,
        max_lag_s: float,
    ) -> None:
        self.chain, self.replica, self.bases = chain, replica, bases
        self.segment_steps, self.max_lag_s = segment_steps, max_lag_s
        self.slices: dict[tuple[int, int], set[int]] = {}  # stored slices of snapshots, by (lsn, how many there are)
        self.put_s = 0.0  # how long the last segments took from being handed over to being durable
        self.cpu_a_cut = 0.0  # processor seconds that took
        self.bytes_written = 0  # of records in segments, since this writer began
        self.bytes_per_step = 0.0  # of all owned shards' records, in the last segments
        self._gap = False
        self._residuals: deque[tuple[int, int, int, pa.Buffer]] = deque()
        self._lock = threading.Lock()

    def take_residual(self, lsn: int, number: int, of: int, data: pa.Buffer) -> None:
        """Keep one slice of a compressor snapshot (fp32), the `number`th of `of`, until it is written."""
        with self._lock:
            self._residuals.append((lsn, number, of, data))

    def waiting(self) -> bool:
        """Whether anything complete is not written yet."""
        behind = min(self.replica.durable().values()) < self.replica.complete
        return behind or bool(self._residuals)

    def work(self, *, flush: bool) -> bool:
        """Write what is due, everything that is complete if `flush`; return whether there was anything.

        Raises:
            StoreError: the store refused; nothing is lost.
            Fenced: a newer generation owns the log.
            StateMismatch: merging, to bridge a gap, did not lead to the logged state.
        """
        if self._gap:
            self._bridge_gap()
        return self._write_segments(flush) | self._write_residual()

    def leave_gap(self) -> None:
        """Give up the records that the store would not take; the log goes on with bases once it answers."""
        self.replica.forget_unwritten()
        self._gap = True

    def _write_segments(self, flush: bool) -> bool:
        began, cpu = clock.monotonic(), clock.thread_cpu()
        # A record is due while there is still time to write it: the last put tells how much that takes.
        age = max(RESERVE * self.max_lag_s - 2 * self.put_s, self.max_lag_s / 4)
        cuts = self.replica.cut(self.segment_steps, age, all_of_it=flush)
        for cut in cuts:
            self.chain.put_segment(cut.shard, cut.first, cut.last, joined(cut.batches))
        if cuts:
            self.chain.check_tenure()
        for cut in cuts:
            self.replica.written(cut.shard, cut.last)
        if cuts:
            self.put_s, self.cpu_a_cut = clock.monotonic() - began, clock.thread_cpu() - cpu
            size, steps = sum(b.nbytes for cut in cuts for b in cut.batches), max(len(cut.batches) for cut in cuts)
            self.bytes_per_step = size / steps
            self.bytes_written += size
        return bool(cuts)

    def _write_residual(self) -> bool:
        if not self._residuals:
            return False
        lsn, number, of, data = self._residuals[0]
        if not any(key[0] == lsn and key[1] != of for key in self.slices):  # else the step was taken again by others
            tensor = torch.frombuffer(bytearray(data), dtype=torch.float32)
            self.chain.put_compressor(lsn, number, to_batches({"residual": tensor}), {})
            self.slices.setdefault((lsn, of), set()).add(number)
        with self._lock:
            self._residuals.popleft()
        return True

    def declare_gap(self, last: int, reason: str) -> None:
        """Say that steps up to `last` which the store does not hold now cannot be restored.

        Said before a base takes their place: whoever dies in between leaves no hole that nobody knows of. A store may
        have taken a segment whose answer never came; what arrived is no part of the gap.
        """
        manifest, listing, durable = self.chain.manifest, self.chain.listing(), self.replica.durable()
        first = 1 + min(reach_from(manifest, listing, shard)(lsn) for shard, lsn in durable.items())
        if first <= last:
            body = {"first": first, "last": last, "reason": reason}
            self.chain.add_event(f"gap-{last:012d}-s{min(durable):04d}", body)

    def _bridge_gap(self) -> None:
        complete, reason = self.replica.complete, "the store refused for too long"
        self.declare_gap(complete, reason)
        reached = {shard: self.bases.write(shard, complete) for shard in self.replica.states}
        self.chain.check_tenure()
        if max(reached.values()) > complete:
            self.declare_gap(max(reached.values()), reason)
        for shard, lsn in reached.items():
            self.replica.written(shard, lsn)
        self._gap = False
