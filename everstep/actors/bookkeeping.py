"""What a fault handler writes down as a run goes on: names of bases and snapshots, what is collected, new intervals.

It only looks at what the checkpoint actors said last; writing is the notebook's, so that a store that is away holds
nobody up.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from everstep.core import clock
from everstep.core.errors import CorruptObject, StoreError
from everstep.platform.costs import Costs, History, limits_of
from everstep.platform.settings import JobSettings
from everstep.platform.tuner import TUNERS
from everstep.storage.chain import Chain
from everstep.storage.collect import collect
from everstep.storage.manifest import Base, CompressorSnapshot
from everstep.storage.retention import Retention

if TYPE_CHECKING:
    from everstep.actors.context import RunContext

COLLECT_S = 5.0  # between two collections, at least,
COLLECT_SHARE = 1 / 50  # and so long that they take no more than this share of the time
TUNE_S = 10.0
LOGGER = logging.getLogger("everstep")


class Bookkeeper:
    """Keeps the books of one run.

    Args:
        run: the run.
    """

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self._named: dict[int, int] = {}  # by shard, the lsn of the last base that was noted
        self._snapshots: set[CompressorSnapshot] = set()  # that were noted
        self._tuned = clock.monotonic()
        self._next_collection = self._tuned + COLLECT_S
        self._rounds = 0
        self._store_away: float | None = None  # since when

    def look(self) -> None:
        """Note what has become known."""
        self.name_all()
        self._watch_store()
        rounds = max((base.round for base in self.run.chain.manifest.bases), default=0)
        if rounds > self._rounds and clock.monotonic() > self._next_collection:
            self._rounds, self._next_collection = rounds, float("inf")
            self.run.notebook.do(self._collect)
        if clock.monotonic() - self._tuned > TUNE_S:
            self._tuned = clock.monotonic()
            self._tune()

    def _watch_store(self) -> None:
        """Tell when the store begins to refuse, and when it answers again."""
        away = [status for status in self.run.checkpointers.status if status.get("store_error_s") is not None]
        if away and self._store_away is None:
            longest = max(away, key=lambda status: float(status["store_error_s"]))
            self._store_away = clock.monotonic() - longest["store_error_s"]
            said = longest["store_error"].splitlines()[0]
            self.run.tell(f"the store refuses, training goes on, records wait in memory: {said}")
        elif not away and self._store_away is not None:
            seconds = clock.monotonic() - self._store_away
            self._store_away = None
            self.run.tell(f"the store answers again after {seconds:.0f} s")

    def name_all(self) -> None:
        """Note the bases that were proved and the snapshots that are complete."""
        status = self.run.checkpointers.status
        self._name_bases([base for part in status for base in part.get("proved", ())])
        self._name_snapshots(status)

    def _name_bases(self, proved: list[Base]) -> None:
        fresh = [base for base in proved if base.lsn > self._named.get(base.shard, -1)]
        if fresh:
            self._named |= {base.shard: base.lsn for base in sorted(fresh, key=lambda base: base.lsn)}
            self.run.notebook.do(lambda chain: chain.name_bases(fresh))

    def _name_snapshots(self, status: list[dict[str, Any]]) -> None:
        found: dict[CompressorSnapshot, set[int]] = {}
        for part in status:  # perhaps an old one: its generation is that of whoever wrote the slices
            for (lsn, of), slices in part.get("slices", {}).items():
                found.setdefault(CompressorSnapshot(part["generation"], lsn, of), set()).update(slices)
        complete = {snapshot for snapshot, slices in found.items() if len(slices) == snapshot.slices}
        fresh = sorted(complete - self._snapshots, key=lambda snapshot: snapshot.lsn)
        if fresh:
            self._snapshots |= complete
            self.run.notebook.do(lambda chain: chain.name_snapshots(fresh))

    def _tune(self) -> None:
        """Derive the intervals anew from what was measured, and tell what changes and why."""
        check, before = self.run.settings.checkpoint, self.run.checkpointers.intervals
        if check.tuner == "off" or not self.run.checkpointers:
            return
        tuned = TUNERS[check.tuner](measured(self.run), history(self.run), limits_of(check), before)
        for reason in tuned.reasons:
            LOGGER.info("run=%s tuner=%s %s", self.run.name, check.tuner, reason)
        if tuned.intervals != before:
            for reason in (reason for reason in tuned.reasons if "->" in reason):
                self.run.tell(reason)
            self.run.checkpointers.retune(tuned.intervals)
            self.run.crew.retune(tuned.intervals.compressor_interval)

    def _collect(self, chain: Chain) -> None:
        began = clock.monotonic()
        try:
            done = collect(chain, retention_of(self.run.settings))
        except (StoreError, CorruptObject) as error:  # best effort: what is too much now is too much next time
            self.run.tell(f"nothing was collected: {error.message}")
            done = None
        ended = clock.monotonic()
        self._next_collection = ended + max(COLLECT_S, (ended - began) / COLLECT_SHARE)
        if done is not None and done.deleted:
            self.run.tell(f"collected {done.deleted} objects, {done.bytes} bytes: {'; '.join(done.plan.reasons)}")


def retention_of(settings: JobSettings) -> Retention:
    """Return what a job's settings keep."""
    check, compression = settings.checkpoint, settings.compression
    residual = compression.method != "none" and compression.residual != "none"
    return Retention(check.keep_rounds, check.keep_every, 3600.0 * check.keep_hours, check.gc_age_s, residual)


def measured(run: RunContext) -> Costs:
    """Return what the workers and checkpoint actors have measured; zero counts as not measured yet."""
    parts = [status.get("costs", {}) for status in run.checkpointers.status]
    most = {name: max((part.get(name, 0.0) for part in parts), default=0.0) or None for name in ("lag_s", "load_s")}
    sums = {
        name: sum(part.get(name, 0.0) for part in parts) or None
        for name in ("segment_s", "base_s", "replay_s", "bytes_per_step", "round_bytes")
    }
    pauses = [body["seconds_to_next_step"] for _, body in run.healings.stored if body["seconds_to_next_step"]]
    latest = run.crew.latest
    return Costs(
        step_s=latest.get("step_s"), stall_s=latest.get("stall_s"), snapshot_s=latest.get("snapshot_s") or None,
        snapshot_bytes=run.spec.snapshot_bytes, restart_s=sum(pauses) / len(pauses) if pauses else None, **sums, **most,
    )  # fmt: skip


def history(run: RunContext) -> History:
    """Return the failures of the run so far, over the time that its steps took."""
    kinds = [body["kind"] for _, body in run.healings.stored]
    total = sum(kind in ("cluster_lost", "kill_everything") for kind in kinds)
    return History(run.lsn() * (run.crew.latest.get("step_s") or 0.0), len(kinds), total)
