"""Forking: a new run from any step of another, without copying it.

The new run's first manifest names the parent's objects, and pins in the parent keep them from being collected for as
long as it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everstep.core.errors import ChainError, StepNotKept, UserError
from everstep.storage.chain import Chain
from everstep.storage.collect import delete_run, unpin
from everstep.storage.keys import CompressorKey, DataKey
from everstep.storage.manifest import Base, CompressorSnapshot, Kept, Manifest, Origin, Span, plain
from everstep.storage.pins import confirm, pin
from everstep.storage.plan import RestorePlan, ShardPlan, plan_restore


def fork(parent: Chain, step: int, run: str, *, settings: Mapping[str, Any], exactness: str) -> Chain:
    """Start the run `run` from the state of `parent` at `step`, in the same store.

    The parent's compressor snapshot is taken over if there is one at just this step; else residuals start at zero.

    Args:
        parent: the run to fork.
        step: an lsn that can be restored.
        run: the new run's name.
        settings: the new run's effective settings.
        exactness: what a replay of the new run promises.

    Raises:
        StepNotKept: the step cannot be restored, or was dropped meanwhile.
        RunExists: there is a run of that name.
        UnknownName: the parent was deleted.
        ChainError: the parent's log is damaged there, or is being taken over.
    """
    listing = parent.listing()
    parent = Chain.open(parent.store, parent.run)  # after the look: whoever takes over now sees the same objects
    if parent.manifest.state == "claim":
        raise ChainError(
            f"run {parent.run!r} is being taken over (manifest {parent.manifest.version}), so its end is not certain",
            hint="try again when that has ended; if it died, resume the run first",
        )
    plan = plan_restore(parent.manifest, listing, target=step)
    snapshots = tuple(s for s in parent.manifest.compressor if s.lsn == step)[-1:]
    keys = [*_objects(plan), *_slices(snapshots)]
    pins = pin(parent, keys, child=run)
    try:
        confirm(parent, pins)
        child = Chain.found(parent.store, _first(parent, plan, snapshots, run, plain(settings), exactness))
    except (UserError, ChainError):  # there is no child that they hold anything for
        unpin(parent.store, pins)
        raise
    # Pins without a child count for a while only, and that may be over; these are written while it is there.
    lasting = pin(parent, keys, child=run)
    try:
        confirm(parent, lasting)
    except StepNotKept:
        delete_run(child)
        unpin(parent.store, pins + lasting)
        raise
    unpin(parent.store, pins)
    return child


def _first(
    parent: Chain,
    plan: RestorePlan,
    snapshots: tuple[CompressorSnapshot, ...],
    run: str,
    settings: dict[str, Any],
    exactness: str,
) -> Manifest:
    """Return the new run's first manifest."""
    bases = tuple(_base(parent, part) for part in plan.shards)
    return Manifest(
        1, run, 1, "open", _lineage(parent, plan), settings, exactness,
        compressor=tuple(replace(s, run=s.run or parent.run) for s in snapshots),
        bases=bases, kept=(Kept(min(base.lsn for base in bases) + 1, None),),
        origin=Origin(parent.run, plan.target), key_id=parent.manifest.key_id,
    )  # fmt: skip


def _objects(plan: RestorePlan) -> list[DataKey]:
    bases: list[DataKey] = [part.base for part in plan.shards]
    return bases + [use.key for part in plan.shards for use in part.segments]


def _slices(snapshots: tuple[CompressorSnapshot, ...]) -> list[DataKey]:
    return [CompressorKey(s.generation, s.lsn, number, s.run) for s in snapshots for number in range(s.slices)]


def _base(parent: Chain, part: ShardPlan) -> Base:
    """Return the base as the new run names it; one that the parent has not proved yet is read back first."""
    known = {base.key: base for base in parent.manifest.bases}
    found = known.get(part.base) or parent.proved(part.base)
    return replace(found, run=part.base.run or parent.run, round=0)


def _lineage(parent: Chain, plan: RestorePlan) -> tuple[Span, ...]:
    """Return the parent's spans between each shard's base and the step, and an open span behind them."""
    spans = []
    for part in plan.shards:
        for span in parent.manifest.lineage:
            if span.shard != part.shard:
                continue
            first = max(span.first, part.base.lsn + 1)
            last = part.lsn if span.last is None else min(span.last, part.lsn)
            cut = Span(span.generation, span.shard, first, max(last, first - 1), span.run or parent.run)
            if first <= last or (span.wrote(part.base) and span.has_base(part.base.lsn)):
                spans.append(cut)
        spans.append(Span(1, part.shard, part.lsn + 1, None))
    return tuple(sorted(spans, key=lambda span: (span.shard, span.first, span.last is None)))
