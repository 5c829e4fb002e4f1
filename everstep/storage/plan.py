"""Which objects restore which step: pure functions of a manifest and a listing.

An object counts only inside the lineage span of its run, generation and shard, and not once it was dropped; another
run's base counts only if the manifest names it. From a base at lsn L, segments reach as far as they follow each other
without a gap. A shard ahead of another is no gap; a hole inside one shard is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from everstep.core.errors import ChainError, ChainGap, StepNotKept
from everstep.storage.keys import BaseKey, DataKey, SegmentKey
from everstep.storage.listing import Listing
from everstep.storage.manifest import Manifest, Span


@dataclass(frozen=True)
class SegmentUse:
    """The records `first` to `last` of a segment, clipped to the lineage and the target."""

    key: SegmentKey
    first: int
    last: int


@dataclass(frozen=True)
class ShardPlan:
    """Load `base`, apply `segments` in order: the shard's state at `lsn`."""

    shard: int
    base: BaseKey
    segments: tuple[SegmentUse, ...]
    lsn: int


@dataclass(frozen=True)
class RestorePlan:
    """How to restore the state at `target`.

    Args:
        target: the lsn that every shard plan ends at.
        shards: one plan a shard.
        reached: by shard, the last lsn reachable without a gap.
        highest: highest lsn that any shard shows within the lineage.
        reasons: why this target and these bases, one sentence each.
    """

    target: int
    shards: tuple[ShardPlan, ...]
    reached: Mapping[int, int]
    highest: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class _Shard:
    """What counts of one shard: bases by lsn, uses by first lsn; `end` is the lsn that the lineage says it has."""

    shard: int
    bases: tuple[BaseKey, ...]
    uses: tuple[SegmentUse, ...]
    end: int

    def ranges(self) -> list[tuple[int, int]]:
        """The lsns that can be restored, as disjoint ascending (first, last)."""
        found: list[tuple[int, int]] = []
        for base in self.bases:
            if found and base.lsn <= found[-1][1] + 1:
                found[-1] = (found[-1][0], max(found[-1][1], self._from(base.lsn)))
            else:
                found.append((base.lsn, self._from(base.lsn)))
        return found

    def reached(self) -> int:
        return self._from(self.bases[-1].lsn) if self.bases else -1

    def shown(self) -> int:
        return max([-1, *(use.last for use in self.uses), *(base.lsn for base in self.bases)])

    def _from(self, lsn: int) -> int:
        for use in self.uses:
            if use.first > lsn + 1:
                break
            lsn = max(lsn, use.last)
        return lsn


def reachable(manifest: Manifest, listing: Listing, shard: int, exclude: Collection[DataKey] = frozenset()) -> int:
    """Return the last lsn of `shard` that is reachable from a base without a gap; -1 if it has no base at all."""
    return _counting(manifest, listing, shard, exclude).reached()


def reach_from(manifest: Manifest, listing: Listing, shard: int) -> Callable[[int], int]:
    """Return the function that says how far the segments of `shard` go on from an lsn without a gap."""
    return _counting(manifest, listing, shard, ())._from


def history(manifest: Manifest) -> tuple[Span, ...]:
    """Return the lineage as it counts: a finished run ends at its last lsn, whatever a stopped writer adds later."""
    if manifest.closing is None:
        return manifest.lineage
    end = int(manifest.closing["last_lsn"])
    return tuple(replace(span, last=end) if span.last is None else span for span in manifest.lineage)


def counting(manifest: Manifest, listing: Listing, shard: int) -> tuple[tuple[BaseKey, ...], tuple[SegmentUse, ...]]:
    """Return what counts of one shard: its bases by lsn, its records by segment, clipped to the lineage."""
    part = _counting(manifest, listing, shard, ())
    return part.bases, part.uses


def plan_restore(
    manifest: Manifest,
    listing: Listing,
    *,
    target: int | None = None,
    shards: Collection[int] | None = None,
    exclude: frozenset[DataKey] = frozenset(),
) -> RestorePlan:
    """Choose the objects that restore one step.

    Args:
        manifest: the run's highest manifest.
        listing: a look at the run's objects that is not older than the manifest.
        target: the lsn wanted; None = the highest that all of `shards` reach.
        shards: the shards to plan; None = all of the run.
        exclude: objects known to be damaged.

    Raises:
        ChainGap: the log has a hole before its end, or a finished run lacks its tail.
        StepNotKept: no base and segments lead to `target`.
        ChainError: some shard has no base, or there is no step that all shards reach.
    """
    wanted = sorted(manifest.shards if shards is None else shards)
    parts = [_counting(manifest, listing, shard, exclude) for shard in wanted]
    common = _common(manifest, parts)
    _check_complete(manifest, parts, target, common[-1][1])
    if target is None:
        target = common[-1][1]
    elif not any(first <= target <= last for first, last in common):
        _not_kept(manifest.run, parts, target, common)
    reached = {part.shard: part.reached() for part in parts}
    highest = max(part.shown() for part in parts)
    plans = tuple(_plan_shard(part, target) for part in parts)
    return RestorePlan(target, plans, reached, highest, _reasons(plans, target, highest, exclude))


def _counting(manifest: Manifest, listing: Listing, shard: int, exclude: Collection[DataKey]) -> _Shard:
    spans = [span for span in history(manifest) if span.shard == shard]
    dropped, named = set(manifest.dropped), {base.key for base in manifest.bases}

    def counts(key: BaseKey | SegmentKey) -> bool:
        if key.run:
            return key not in exclude and (key in named or isinstance(key, SegmentKey))
        return key not in exclude and key.path not in dropped

    all_bases = [key for key in listing.bases(shard) if counts(key)]
    all_segments = [key for key in listing.segments(shard) if counts(key)]
    bases: set[BaseKey] = set()
    uses: set[SegmentUse] = set()
    for span in spans:
        bases |= {key for key in all_bases if span.wrote(key) and span.has_base(key.lsn)}
        for key in all_segments:
            first = max(key.first, span.first)
            last = key.last if span.last is None else min(key.last, span.last)
            if span.wrote(key) and first <= last:
                uses.add(SegmentUse(key, first, last))
    return _Shard(
        shard,
        tuple(sorted(bases, key=lambda key: (key.lsn, key.generation, key.id))),
        tuple(sorted(uses, key=lambda use: (use.first, -use.last))),
        max((span.last for span in spans if span.last is not None), default=-1),
    )


def _common(manifest: Manifest, parts: list[_Shard]) -> list[tuple[int, int]]:
    """The lsns that every shard can be restored at, as disjoint ascending ranges."""
    common = [(0, max((part.shown() for part in parts), default=0))]
    for part in parts:
        if not part.bases:
            raise ChainError(
                f"run {manifest.run!r}, shard {part.shard}: expected a base, got none in the lineage; "
                "without one nothing can be restored",
                hint="start the run again under another name; if objects were removed by hand, put them back",
            )
        pairs = ((max(a, c), min(b, d)) for a, b in common for c, d in part.ranges())
        common = [(first, last) for first, last in pairs if first <= last]
    if not common:
        where = "; ".join(f"shard {part.shard}: {part.ranges()}" for part in parts)
        raise ChainError(
            f"run {manifest.run!r}: there is no step that all shards reach ({where})",
            hint="if objects were removed by hand, put them back; else start the run again under another name",
        )
    return common


def _check_complete(manifest: Manifest, parts: list[_Shard], target: int | None, restorable: int) -> None:
    """Raise ChainGap where the end of the log was asked for, or more, and is cut off from its bases."""
    for part in parts:
        reached = part.reached()
        if target is not None and target <= reached:
            continue
        if beyond := [use for use in part.uses if use.first > reached + 1]:
            _gap(
                manifest.run,
                restorable,
                f"shard {part.shard} has lsn up to {reached} and then {beyond[0].first} to {beyond[0].last} "
                f"(object {beyond[0].key.path}); expected a segment from {reached + 1}, got none",
            )
        if reached < part.end:
            says = "the lineage says it was written up to" if manifest.closing is None else "the finished run ends at"
            _gap(
                manifest.run,
                restorable,
                f"missing tail: {says} lsn {part.end}, but shard {part.shard} has only up to {reached}; "
                f"expected segments {reached + 1} to {part.end}, got none",
            )


def _not_kept(run: str, parts: list[_Shard], target: int, common: list[tuple[int, int]]) -> NoReturn:
    short = next(part for part in parts if not any(first <= target <= last for first, last in part.ranges()))
    raise StepNotKept(
        f"run {run!r}: step {target} cannot be restored; steps that can: {_worded(common)} "
        f"(shard {short.shard} has {_worded(short.ranges())})",
        hint="choose a step from those",
    )


def _worded(ranges: list[tuple[int, int]]) -> str:
    return ", ".join(f"{first} to {last}" for first, last in ranges)


def _gap(run: str, restorable: int, what: str) -> NoReturn:
    raise ChainGap(
        f"run {run!r}: {what}",
        hint=f"put the missing objects back, or take what is whole: everstep chain export {run} --step {restorable}",
    )


def _plan_shard(part: _Shard, target: int) -> ShardPlan:
    # Of two bases the newer reaches at least as far as the older, so only the newest at or below the target matters.
    base = next(base for base in reversed(part.bases) if base.lsn <= target)
    lsn, chosen = base.lsn, []
    for use in part.uses:
        if lsn < use.last and use.first <= lsn + 1 and lsn < target:
            last = min(use.last, target)
            chosen.append(SegmentUse(use.key, lsn + 1, last))
            lsn = last
    assert lsn == target, f"shard {part.shard} was said to reach {target} but ends at {lsn}"
    return ShardPlan(part.shard, base, tuple(chosen), target)


def _reasons(plans: tuple[ShardPlan, ...], target: int, highest: int, exclude: frozenset[DataKey]) -> tuple[str, ...]:
    reasons = [f"step {target}; the highest that any shard shows is {highest}"]
    reasons += [f"shard {p.shard}: base at {p.base.lsn}, then {len(p.segments)} segments" for p in plans]
    if exclude:
        reasons.append(f"{len(exclude)} damaged objects left out")
    return tuple(reasons)
