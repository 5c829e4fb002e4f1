"""Naming what was written in a manifest: pure functions that return what that changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from everstep.storage.manifest import Base, CompressorSnapshot, Manifest
from everstep.storage.takeover import holds


def with_bases(manifest: Manifest, proved: Iterable[Base]) -> dict[str, Any]:
    """Return what naming these bases changes; nothing for those that were dropped or cut off, or are not newer.

    A shard's bases are named in order: what comes late was named before.
    """
    bases = list(manifest.bases)
    for base in sorted(proved, key=lambda base: base.lsn):
        mine = [other for other in bases if other.shard == base.shard]
        newest = max((other.lsn for other in mine), default=-1)
        if base.lsn > newest and base.key.path not in manifest.dropped and holds(manifest.lineage, base):
            # A shard that lost rounds, or missed some, catches up: else rounds grow wider with every takeover.
            behind = 1 + max((other.round for other in mine), default=-1)
            bases.append(replace(base, round=max([behind, *(other.round for other in bases)])))
    if len(bases) == len(manifest.bases):
        return {}
    return {"bases": tuple(sorted(bases, key=lambda base: (base.shard, base.lsn, base.round)))}


def with_snapshots(manifest: Manifest, complete: Iterable[CompressorSnapshot]) -> dict[str, Any]:
    """Return what naming these snapshots changes; nothing for those of another generation, or not newer."""
    newest = max((snapshot.lsn for snapshot in manifest.compressor), default=-1)
    fresh = tuple(s for s in complete if s.lsn > newest and s.generation == manifest.generation)
    return {"compressor": manifest.compressor + fresh} if fresh else {}
