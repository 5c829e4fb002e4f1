"""Where a new generation cuts the log of those before it: pure functions of a manifest and a listing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from everstep.storage.listing import Listing
from everstep.storage.manifest import Base, Kept, Manifest, Span
from everstep.storage.plan import counting, plan_restore, reachable

Cut = Literal["common", "each"]


def clips(manifest: Manifest, listing: Listing, *, cut: Cut, at: int | None = None) -> dict[int, int]:
    """Return, by shard, the last lsn of the old generations that stays part of the run.

    Args:
        manifest: the run's highest manifest.
        listing: a look at its objects.
        cut: "common" = the highest step that all shards reach; "each" = every shard at its own last lsn.
        at: with "common", cut there if it is lower.

    Returns:
        lsn by shard; 0 where a shard has nothing yet.

    Raises:
        ChainError: with "common", and of a finished run: a gap, a missing tail, no base, or no way to restore `at`.
    """
    reached = {shard: max(0, reachable(manifest, listing, shard)) for shard in manifest.shards}
    if cut == "each":
        if manifest.closing is not None:
            plan_restore(manifest, listing)  # nobody has what a finished run lacks
        return reached
    if not listing.segments() and not any(base.lsn for base in listing.bases()):
        return reached  # the run died before its first record; there is nothing to lose
    if at is None:
        end = plan_restore(manifest, listing).target
    else:
        end = plan_restore(manifest, listing, target=min(at, *reached.values())).target
    return dict.fromkeys(reached, end)


def cut_changes(manifest: Manifest, listing: Listing, cut: Cut, clip: Mapping[int, int]) -> dict[str, Any]:
    """Return what a takeover that keeps the lsns up to `clip` changes in the structure that the claim names."""
    lineage = _cut_lineage(manifest, listing, clip)
    end = min(clip.values(), default=0)
    based = {shard: [base.lsn for base in counting(manifest, listing, shard)[0]] for shard in clip}
    low = min((max((lsn for lsn in based[s] if lsn <= last), default=0) for s, last in clip.items()), default=0)
    return {
        "lineage": lineage,
        "bases": tuple(base for base in manifest.bases if holds(lineage, base)),
        "kept": _cut_kept(manifest.kept, low),
        # With "each" the workers go on from where they are, so everything that was written stays history.
        "compressor": tuple(s for s in manifest.compressor if cut == "each" or s.lsn <= end),
        "closing": None,
    }


def holds(lineage: Iterable[Span], base: Base) -> bool:
    """Whether a base lies on the history that the lineage tells."""
    return any(span.wrote(base.key) and span.has_base(base.lsn) for span in lineage)


def _cut_lineage(manifest: Manifest, listing: Listing, clip: Mapping[int, int]) -> tuple[Span, ...]:
    """Return the lineage with old spans clipped and a new open span of the manifest's generation behind each.

    A span that keeps no lsn is dropped, unless it holds a base at the clip.
    """
    bases = listing.bases()
    kept = []
    for span in manifest.lineage:
        last = clip[span.shard] if span.last is None else min(span.last, clip[span.shard])
        if last >= span.first or (last == span.first - 1 and any(span.wrote(b) and b.lsn == last for b in bases)):
            kept.append(replace(span, last=last))
    kept += [Span(manifest.generation, shard, lsn + 1, None) for shard, lsn in clip.items()]
    return tuple(sorted(kept, key=lambda span: (span.shard, span.first, span.generation)))


def _cut_kept(kept: tuple[Kept, ...], low: int) -> tuple[Kept, ...]:
    """Return what is kept of a history whose end is restored from bases at `low` or later; what begins later is gone.

    The range of that base goes on from there. There is none if the end had been given up and only not been deleted yet.
    """
    before = [part for part in kept if part.first <= low + 1]
    if before and (before[-1].last is None or before[-1].last >= low):
        return (*before[:-1], Kept(before[-1].first, None))
    return (*before, Kept(low + 1, None))
