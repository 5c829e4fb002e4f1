"""Deleting: the only file that removes anything from a store (a writer's own manifest that came too late apart).

In this order: commit a manifest that drops the objects (it fails if this writer is fenced), then list the pins, then
delete what is dropped, not pinned and old enough. A collector that is stopped in the middle and wakes much later still
deletes only what its manifest dropped, and a dropped name is never used again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from everstep.core import clock
from everstep.storage.chain import Chain
from everstep.storage.keys import DataKey, EventKey, ManifestKey, PinKey
from everstep.storage.manifest import Manifest
from everstep.storage.pins import Pin, confirm, live, pin, read_pins
from everstep.storage.retention import GcPlan, Retention, plan_gc
from everstep.storage.store import Store

POINTS = ("planned", "dropped", "pins_read", "deleting", "deleted", "unpinning", "trimming", "swept")
FORK_S = 60.0  # at least so long may a fork take between its pin and its first manifest
PUT_S = 24 * 3600.0  # a put that is still at work is younger than this


@dataclass(frozen=True)
class Collected:
    """What a collection did, or with `dry_run` would do. Sizes in bytes."""

    plan: GcPlan
    deleted: int
    bytes: int
    swept: int
    dry_run: bool


def _nothing(point: str) -> None:
    """The default of `collect`'s `at`."""


def collect(chain: Chain, keep: Retention, *, dry_run: bool = False, at: Callable[[str], None] = _nothing) -> Collected:
    """Drop and delete what a run need not keep.

    Args:
        chain: the run, in its current generation.
        keep: what to keep.
        dry_run: only plan.
        at: called with each of `POINTS` as it is passed; tests crash and stop in there.

    Raises:
        Fenced: a newer generation owns the log; nothing was dropped.
        CorruptObject: a pin cannot be read; nothing was dropped.
        StoreError: the store failed; whatever was deleted had been dropped before.
    """
    now = clock.wall()
    chain.check_tenure()
    listing = chain.listing()
    pinned, _ = _pinned(chain, keep)
    plan = plan_gc(chain.manifest, listing, pinned, keep, now)
    at("planned")
    if dry_run:
        return Collected(plan, len(plan.drop), sum(item.size for item in plan.drop), 0, True)
    chain.update(lambda manifest: plan_gc(manifest, listing, pinned, keep, now).changes)
    dropped = chain.manifest.dropped
    at("dropped")
    pinned, void = _pinned(chain, keep)
    at("pins_read")
    sizes = {key.path: info.size for key, info in listing.objects if not getattr(key, "run", "")}
    going = [path for path in dropped if path not in pinned]
    for path in going:
        at("deleting")
        chain.store.delete(f"{chain.run}/{path}")
        at("deleted")
    at("unpinning")
    unpin(chain.store, void)
    at("trimming")
    for version in listing.versions():
        if version < chain.manifest.oldest:
            chain.store.delete(f"{chain.run}/{ManifestKey(version).path}")
    swept = chain.store.sweep(max(keep.min_age_s, PUT_S))  # of the whole store: other runs are being written
    at("swept")
    return Collected(plan, len(going), sum(sizes.get(path, 0) for path in going), swept, False)


def collect_all(chain: Chain, keep: Retention) -> Collected:
    """Collect until nothing is left to drop; return the sum of it. Raises as `collect`."""
    total = collect(chain, keep)
    while total.plan.more:
        part = collect(chain, keep)
        plan = replace(part.plan, drop=total.plan.drop + part.plan.drop)
        deleted, size = total.deleted + part.deleted, total.bytes + part.bytes
        total = Collected(plan, deleted, size, total.swept + part.swept, False)
    return total


def delete_run(chain: Chain, *, ended: bool = True) -> Collected:
    """Delete a run, all of it but what forks of it still use; that goes by the next call after they have gone.

    Args:
        chain: the run.
        ended: nobody writes it any more. Else a writer that is still at it is fenced, and the manifest that says so
            stays, to be found by it; the next call removes that.

    Raises:
        UnknownName: it was deleted meanwhile.
        ChainError: a pin or a fork is damaged, so that nobody knows what is used.
        StoreError: the store failed; calling this again goes on where it ended.
    """
    if chain.manifest.state != "deleted":
        chain.fence(_deleted)
    done = collect_all(chain, Retention(rounds=1, young_s=0.0, min_age_s=0.0))
    if ended and not read_pins(chain.store, chain.run):
        _delete_rest(chain)
    return done


def _deleted(manifest: Manifest) -> dict[str, Any]:
    nothing: dict[str, Any] = dict.fromkeys(("lineage", "bases", "compressor", "kept"), ())
    return {**nothing, "state": "deleted", "oldest": manifest.version + 1}


@contextmanager
def held(chain: Chain, keys: Iterable[DataKey]) -> Iterator[None]:
    """Hold objects for as long as a restore takes. Raises as `pins.confirm`."""
    pins = pin(chain, keys)
    try:
        confirm(chain, pins)
        yield
    finally:
        unpin(chain.store, pins)


def unpin(store: Store, pins: Iterable[Pin]) -> None:
    """Remove pins."""
    for made in pins:
        store.delete(made.name)


def _delete_rest(chain: Chain) -> None:
    """Remove events, then manifests, the highest last: until it is gone, the run stays deleted."""
    listing = chain.listing()
    if listing.generations():
        return  # a writer that does not know yet has put something: the next call removes that
    for key, _ in listing.objects:
        if isinstance(key, EventKey | PinKey):
            chain.store.delete(f"{chain.run}/{key.path}")
    for version in listing.versions():
        chain.store.delete(f"{chain.run}/{ManifestKey(version).path}")


def _pinned(chain: Chain, keep: Retention) -> tuple[frozenset[str], list[Pin]]:
    """Return the paths that pins hold, and the pins that hold nothing any more."""
    counting, void = live(chain.store, chain.run, grace_s=max(keep.min_age_s, FORK_S))
    return frozenset(path for made in counting for path in made.objects), void
