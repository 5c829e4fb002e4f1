"""A run's manifests in a store: find the highest, create the next, refuse what does not add up."""

from __future__ import annotations

import pyarrow as pa

from everstep.core.errors import ChainError, CorruptObject, Fenced, ObjectExists, ObjectMissing, StoreError
from everstep.storage.keys import MANIFESTS, ManifestKey
from everstep.storage.listing import Listing
from everstep.storage.manifest import Manifest
from everstep.storage.store import Buffer, Store


def create_object(store: Store, key: str, data: Buffer) -> bool:
    """Create an object; False if other bytes have the name.

    Equal bytes there are our own put whose answer was lost.
    """
    try:
        store.put(key, data)
    except ObjectExists:
        try:
            return bool(pa.py_buffer(store.get(key)).equals(pa.py_buffer(data)))
        except ObjectMissing:  # deleted since
            return False
    return True


def create(store: Store, manifest: Manifest) -> bool:
    """Create this manifest; False if another has its version."""
    return create_object(store, f"{manifest.run}/{ManifestKey(manifest.version).path}", manifest.to_json())


def highest(store: Store, run: str) -> int:
    """Return the highest manifest version of the run, 0 if it has none."""
    return max(_versions(store, run), default=0)


def latest(store: Store, run: str) -> Manifest | None:
    """Read the highest manifest; None if the run has none.

    Raises:
        ChainError: a hole in the version numbers.
        CorruptObject: it is damaged or belongs to another run or version.
    """
    versions = _versions(store, run)
    if versions != list(range(1, len(versions) + 1)):
        versions = _versions(store, run)  # a folder read while it grows may show a later entry without an earlier one
    if not versions:
        return None
    if missing := sorted(set(range(1, versions[-1] + 1)) - set(versions)):
        raise ChainError(
            f"run {run!r}: manifest versions go up to {versions[-1]}, but {missing[0]} is missing "
            f"({run}/{ManifestKey(missing[0]).path})",
            hint="put the removed object back; without it nobody can say which writer owned the log",
        )
    where = f"{run}/{ManifestKey(versions[-1]).path}"
    manifest = Manifest.from_json(store.get(where), where=where)
    if (manifest.run, manifest.version) != (run, versions[-1]):
        raise CorruptObject(
            f"{where} does not fit its name: expected run {run!r} version {versions[-1]}, "
            f"got run {manifest.run!r} version {manifest.version}",
            hint="a run cannot be renamed by renaming its folder; give it back its name",
        )
    return manifest


def check_generations(run: str, listing: Listing, generation: int) -> None:
    """Refuse objects of generations that no manifest knows.

    Raises:
        ChainError: names the first such folder.
    """
    above = [found for found in listing.generations() if found > generation]
    if above:
        raise ChainError(
            f"run {run!r}: folder {run}/g{above[0]:06d} holds objects, but the highest manifest has generation "
            f"{generation}",
            hint=f"put the missing manifest back, or move {run}/g{above[0]:06d} away if it is not this run's",
        )


def fenced(generation: int, owner: Manifest) -> Fenced:
    """Return the error for a writer of `generation` that found the manifest of a newer one."""
    return Fenced(
        f"run {owner.run!r}: this writer has generation {generation}, but generation {owner.generation} owns the log "
        f"(manifest {owner.version}, writer {owner.writer})",
        hint="stop this process; the newer generation continues the run",
    )


def lost_races(run: str, tries: int) -> StoreError:
    """Return the error for a writer that never got the next version."""
    return StoreError(
        f"run {run!r}: lost the race for the next manifest {tries} times in a row",
        hint="check that one controller writes this run, and that the store's listing shows new objects at once",
    )


def _versions(store: Store, run: str) -> list[int]:
    return Listing.of(run, store.list(f"{run}/{MANIFESTS}")).versions()
