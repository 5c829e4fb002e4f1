"""Where a new generation cuts the log of those before it: pure functions of a manifest and a listing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from everstep.storage.listing import Listing
from everstep.storage.manifest import CompressorSnapshot, Manifest, Span
from everstep.storage.plan import plan_restore, reachable

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
        ChainError: with "common": a gap, a missing tail, no base, or no way to restore `at`.
    """
    reached = {shard: max(0, reachable(manifest, listing, shard)) for shard in manifest.shards}
    if cut == "each":
        return reached
    if not listing.segments() and not any(base.lsn for base in listing.bases()):
        return reached  # the run died before its first record; there is nothing to lose
    if at is None:
        end = plan_restore(manifest, listing).target
    else:
        end = plan_restore(manifest, listing, target=min(at, *reached.values())).target
    return dict.fromkeys(reached, end)


def cut_lineage(manifest: Manifest, listing: Listing, generation: int, clip: Mapping[int, int]) -> tuple[Span, ...]:
    """Return the lineage with old spans clipped and a new open span of `generation` behind each.

    A span that keeps no lsn is dropped, unless it holds a base at the clip.
    """
    bases = {(base.generation, base.shard, base.lsn) for base in listing.bases()}
    kept = []
    for span in manifest.lineage:
        last = clip[span.shard] if span.last is None else min(span.last, clip[span.shard])
        if last >= span.first or (last == span.first - 1 and (span.generation, span.shard, last) in bases):
            kept.append(Span(span.generation, span.shard, span.first, last))
    kept += [Span(generation, shard, lsn + 1, None) for shard, lsn in clip.items()]
    return tuple(sorted(kept, key=lambda span: (span.shard, span.first, span.generation)))


def cut_compressor(manifest: Manifest, cut: Cut, clip: Mapping[int, int]) -> tuple[CompressorSnapshot, ...]:
    """Return the snapshots that still lie on the run's history.

    With "each" the workers go on from where they are, so everything that was written stays history.
    """
    if cut == "each":
        return manifest.compressor
    return tuple(snapshot for snapshot in manifest.compressor if snapshot.lsn <= min(clip.values()))
