"""What a run need not keep any more: pure functions of a manifest, a listing, the pinned objects and the time.

Retention counts rounds. A round is complete when the store can restore its highest lsn from its own bases. The newest
`rounds` complete ones stay, and all that is younger than `young_s`; with their segments every step from the highest of
the oldest of them on can be restored. Of the older ones each `every`-th stays for ever, with the segments between its
own bases.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.storage.keys import BaseKey, CompressorKey, DataKey, ManifestKey, SegmentKey
from everstep.storage.listing import Listing
from everstep.storage.manifest import Base, CompressorSnapshot, Kept, Manifest, Span
from everstep.storage.plan import counting, history, reach_from

MANIFESTS_KEPT = 100
BATCH = 2000  # objects dropped at a time, so that manifests stay small


@dataclass(frozen=True)
class Retention:
    """What to keep.

    Attributes:
        rounds: how many of the newest rounds; at least 1.
        every: of the older ones each so-manieth for ever; 0 for none.
        young_s: segments (and the rounds to restore them from) younger than this stay.
        min_age_s: nothing younger than this is deleted, whatever the rest says.
        residual: the run has state that only compressor snapshots keep: without one, all is kept from the start on.
    """

    rounds: int = 3
    every: int = 0
    young_s: float = 3600.0
    min_age_s: float = 3600.0
    residual: bool = False


@dataclass(frozen=True)
class Drop:
    """One object that goes: `path` in its run, `size` in bytes."""

    path: str
    size: int
    reason: str


@dataclass(frozen=True)
class GcPlan:
    """What a collection does.

    Attributes:
        changes: what the manifest that drops the objects changes; empty: nothing.
        drop: the objects it drops.
        spared: how many objects would go but for the reason that is their key.
        more: whether more is waiting than fits into one manifest.
        reasons: why so, in words.
    """

    changes: dict[str, Any]
    drop: tuple[Drop, ...]
    spared: dict[str, int]
    more: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class _Round:
    number: int
    low: int
    high: int


@dataclass(frozen=True)
class _Keep:
    """What stays named (bases, lsns of segments, compressor snapshots, spans), and bases that stay without a name."""

    bases: tuple[Base, ...]
    kept: tuple[Kept, ...]
    compressor: tuple[CompressorSnapshot, ...]
    lineage: tuple[Span, ...]
    unnamed: frozenset[BaseKey]


def plan_gc(manifest: Manifest, listing: Listing, pinned: Collection[str], keep: Retention, now: float) -> GcPlan:
    """Choose what to drop.

    Args:
        manifest: the run's highest manifest.
        listing: a look at the run's objects.
        pinned: paths of objects that a restore or a fork uses.
        keep: what to keep.
        now: seconds since the epoch.
    """
    if manifest.state == "claim":
        return GcPlan({}, (), {}, False, ("a takeover is under way: nothing is collected before it has ended",))
    staying, reasons = _staying(manifest, listing, keep, now)
    drop, spared = [], {"pinned": 0, f"younger than {keep.min_age_s:g} s": 0}
    dropped = set(manifest.dropped)
    for key, info in listing.objects:
        if not isinstance(key, DataKey) or key.run or key.path in dropped:
            continue
        reason = _reason(key, manifest, staying)
        if reason is None:
            continue
        if key.path in pinned:
            spared["pinned"] += 1
        elif now - info.modified < keep.min_age_s:
            spared[f"younger than {keep.min_age_s:g} s"] += 1
        else:
            drop.append(Drop(key.path, info.size, reason))
    chosen = tuple(drop[:BATCH])
    # A dropped name stays dropped for as long as the object is there: a collector that slept may still delete it.
    there = {key.path for key, _ in listing.objects if isinstance(key, DataKey) and not key.run}
    names = tuple(sorted((dropped & there) | {item.path for item in chosen}))
    wanted = {
        "bases": staying.bases, "kept": staying.kept, "compressor": staying.compressor, "lineage": staying.lineage,
        "dropped": names, "oldest": _oldest(manifest, listing, keep, now),
    }  # fmt: skip
    changes = {name: value for name, value in wanted.items() if getattr(manifest, name) != value}
    return GcPlan(changes, chosen, {k: n for k, n in spared.items() if n}, len(drop) > BATCH, tuple(reasons))


def _staying(manifest: Manifest, listing: Listing, keep: Retention, now: float) -> tuple[_Keep, list[str]]:
    if manifest.state == "deleted":
        return _Keep((), (), (), (), frozenset()), ["the run was deleted"]
    open_from = manifest.kept[-1].first
    rounds = _rounds(manifest, listing)
    current = [r for r in rounds if r.low + 1 >= open_from]
    floor = _floor(current, manifest, listing, keep, now)
    if floor is None:
        everything = frozenset(listing.bases())
        staying = _Keep(manifest.bases, manifest.kept, manifest.compressor, manifest.lineage, everything)
        return staying, ["no complete round yet that is old enough for what is needed: all of the history is kept"]
    for_ever = _for_ever([r for r in rounds if r.number < floor.number], keep.every)
    numbers = {r.number for r in for_ever}
    kept = _merged([*(Kept(r.low + 1, r.high) for r in for_ever), Kept(floor.low + 1, None)])
    bases = tuple(base for base in manifest.bases if base.round >= floor.number or base.round in numbers)
    snapshots = tuple(snapshot for snapshot in manifest.compressor if snapshot.lsn >= floor.high)
    unnamed = _unnamed(manifest, listing, [base for base in bases if base.round >= floor.number])
    keys = unnamed | {base.key for base in bases}
    lineage = tuple(span for span in manifest.lineage if _needed(span, kept, keys))
    reasons = [f"every step from {floor.high} on is kept: {len(current)} rounds, the oldest needed is {floor.number}"]
    if for_ever:
        reasons.append(f"{len(for_ever)} older rounds are kept for ever (one of every {keep.every})")
    return _Keep(bases, kept, snapshots, lineage, unnamed), reasons


def _rounds(manifest: Manifest, listing: Listing) -> list[_Round]:
    """Return the complete rounds, oldest first: of every shard a named base and the segments up to the highest."""
    there = set(listing.bases())
    reach = {shard: reach_from(manifest, listing, shard) for shard in manifest.shards}
    found: dict[int, dict[int, int]] = {}
    for base in manifest.bases:
        if base.key in there:
            found.setdefault(base.round, {})[base.shard] = base.lsn
    rounds = [(_Round(n, min(lsns.values()), max(lsns.values())), lsns) for n, lsns in sorted(found.items())]
    return [
        r for r, lsns in rounds
        if set(lsns) == set(manifest.shards) and all(reach[shard](lsn) >= r.high for shard, lsn in lsns.items())
    ]  # fmt: skip


def _floor(
    current: Sequence[_Round], manifest: Manifest, listing: Listing, keep: Retention, now: float
) -> _Round | None:
    """Return the oldest round that is needed: for the count, for young segments, for the last compressor snapshot.

    None: no round will do, so that everything is needed.
    """
    young = [
        key.first for key, info in listing.objects
        if isinstance(key, SegmentKey) and not key.run and now - info.modified < keep.young_s
    ]  # fmt: skip
    needs = [first - 1 for first in young]
    if keep.residual:
        needs.append(max((snapshot.lsn for snapshot in manifest.compressor), default=-1))
    enough = [r for r in current[: max(len(current) - keep.rounds + 1, 1)] if r.high <= min(needs, default=math.inf)]
    return enough[-1] if enough else None


def _for_ever(rounds: Iterable[_Round], every: int) -> list[_Round]:
    """Return the first, and then each that is at least `every` rounds behind the last one chosen; 0 for none."""
    chosen: list[_Round] = []
    for r in rounds:
        if every and (not chosen or r.number >= chosen[-1].number + every):
            chosen.append(r)
    return chosen


def _merged(parts: Iterable[Kept]) -> tuple[Kept, ...]:
    """Return the ranges, ascending by first lsn, with those made one that overlap or touch."""
    found: list[Kept] = []
    for part in parts:
        if found and (found[-1].last is None or part.first <= found[-1].last + 1):
            last = None if found[-1].last is None or part.last is None else max(found[-1].last, part.last)
            found[-1] = Kept(found[-1].first, last)
        else:
            found.append(part)
    return tuple(found)


def _unnamed(manifest: Manifest, listing: Listing, named: Iterable[Base]) -> frozenset[BaseKey]:
    """Return the bases that stay though no manifest names them.

    They are about to be named, or steps behind a hole are reached from them alone.

    Args:
        manifest: the run's highest manifest.
        listing: a look at the run's objects.
        named: the bases of the oldest round that is needed and of those after it.
    """
    keys, found = {base.key for base in named}, set()
    for shard in manifest.shards:
        starts = sorted(key.lsn for key in keys if key.shard == shard)
        reach, newest = reach_from(manifest, listing, shard), starts[-1]
        bases, _ = counting(manifest, listing, shard)  # by lsn
        for key in (key for key in bases if key not in keys):
            coming = (key.run, key.generation) == ("", manifest.generation) and key.lsn >= newest
            needed = key.lsn > starts[0] and not any(lsn <= key.lsn <= reach(lsn) for lsn in starts)
            if coming or needed:
                found.add(key)
                starts.append(key.lsn)
    return frozenset(found)


def _needed(span: Span, kept: Iterable[Kept], bases: Iterable[BaseKey]) -> bool:
    last = math.inf if span.last is None else span.last
    return (
        span.last is None
        or any(_overlap(span.first, last, part) for part in kept)
        or any(span.wrote(key) and span.has_base(key.lsn) for key in bases)
    )


def _overlap(first: int, last: float, part: Kept) -> bool:
    return max(first, part.first) <= min(last, math.inf if part.last is None else part.last)


def _reason(key: DataKey, manifest: Manifest, staying: _Keep) -> str | None:
    """Return why the object is not needed; None if it is."""
    if manifest.state == "deleted":
        return "the run was deleted"
    if isinstance(key, SegmentKey):
        return _segment_reason(key, manifest, staying)
    if isinstance(key, BaseKey):
        return _base_reason(key, manifest, staying)
    return _snapshot_reason(key, manifest, staying)


def _segment_reason(key: SegmentKey, manifest: Manifest, staying: _Keep) -> str | None:
    spans = [span for span in history(manifest) if span.wrote(key)]
    parts = [(max(key.first, s.first), key.last if s.last is None else min(key.last, s.last)) for s in spans]
    parts = [(first, last) for first, last in parts if first <= last]
    if not parts:
        return "not of this run's history"
    if any(_overlap(first, last, part) for first, last in parts for part in staying.kept):
        return None
    return f"older than every round that is kept (segments from lsn {staying.kept[-1].first} on are)"


def _base_reason(key: BaseKey, manifest: Manifest, staying: _Keep) -> str | None:
    if any(base.key == key for base in staying.bases):
        return None
    if any(base.key == key for base in manifest.bases):
        return "its round is not kept any more"
    if not any(span.wrote(key) and span.has_base(key.lsn) for span in history(manifest)):
        return "not of this run's history"
    return None if key in staying.unnamed else "was never named"


def _snapshot_reason(key: CompressorKey, manifest: Manifest, staying: _Keep) -> str | None:
    if any((s.run, s.generation, s.lsn) == (key.run, key.generation, key.lsn) for s in staying.compressor):
        return None
    newest = max((snapshot.lsn for snapshot in manifest.compressor), default=-1)
    if key.generation == manifest.generation and key.lsn > newest:
        return None  # perhaps other slices are still to come
    return "not a complete snapshot that is kept"


def _oldest(manifest: Manifest, listing: Listing, keep: Retention, now: float) -> int:
    """Return the lowest manifest version that has to be there: the last ones stay, and the young.

    It moves in leaps: else each collection would write a manifest for that alone.
    """
    if manifest.version - manifest.oldest < 2 * MANIFESTS_KEPT:
        return manifest.oldest
    old = [
        key.version for key, info in listing.objects
        if isinstance(key, ManifestKey) and now - info.modified >= keep.min_age_s
    ]  # fmt: skip
    return max(manifest.oldest, min(manifest.version - MANIFESTS_KEPT, max(old, default=0)))
