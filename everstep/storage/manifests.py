"""A run's manifests in a store: find the highest, create the next, refuse what does not add up."""

from __future__ import annotations

import pyarrow as pa

from everstep.core.errors import ChainError, CorruptObject, Fenced, ObjectExists, ObjectMissing, StoreError
from everstep.storage.keys import MANIFESTS, ManifestKey
from everstep.storage.listing import Listing
from everstep.storage.manifest import Manifest
from everstep.storage.store import Buffer, Pace, Store


def create_object(store: Store, key: str, data: Buffer, *, pace: Pace | None = None) -> bool:
    """Create an object, as fast as `pace` lets it; False if other bytes have the name.

    Equal bytes there are our own put whose answer was lost.
    """
    try:
        store.put(key, data, pace=pace)
    except ObjectExists:
        try:
            return bool(pa.py_buffer(store.get(key)).equals(pa.py_buffer(data)))
        except ObjectMissing:  # deleted since
            return False
    return True


def create(store: Store, manifest: Manifest) -> bool:
    """Create this manifest; False if another has its version, or had it and was collected or deleted since."""
    version, where = manifest.version, f"{manifest.run}/{ManifestKey(manifest.version).path}"
    if not create_object(store, where, manifest.to_json()):
        return False
    # A writer that slept for long may find a name free again; what it writes there counts for nobody.
    found = _versions(store, manifest.run, max(version - 2, 0))
    if found == [version] and version > 1:  # the whole run was deleted: this would be all that there is of it
        store.delete(where)
        return False
    if found[-1:] == [version]:
        return True
    highest = latest(store, manifest.run)
    return highest is not None and highest.oldest <= version


def any_of(store: Store, run: str) -> bool:
    """Whether the run has a manifest."""
    return bool(_versions(store, run))


def is_highest(store: Store, run: str, version: int) -> bool:
    """Whether `version` is there and the highest; a look that costs the same however many there are below."""
    return _versions(store, run, version - 1) == [version]


def latest(store: Store, run: str) -> Manifest | None:
    """Read the highest manifest; None if the run has none.

    Raises:
        ChainError: a version is missing that has not been collected.
        CorruptObject: it is damaged or belongs to another run or version.
    """
    try:
        return _latest(store, run)
    except (ChainError, ObjectMissing):
        # A folder read while it changes may show a later entry without an earlier one, and what is deleted meanwhile.
        return _latest(store, run)


def read(store: Store, run: str, version: int) -> Manifest:
    """Read one manifest. Raises CorruptObject if it is damaged or belongs to another run or version."""
    where = f"{run}/{ManifestKey(version).path}"
    manifest = Manifest.from_json(bytes(store.get(where)), where=where)
    if (manifest.run, manifest.version) != (run, version):
        raise CorruptObject(
            f"{where} does not fit its name: expected run {run!r} version {version}, "
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


def check_claim(manifest: Manifest, listing: Listing) -> None:
    """Refuse a claim whose generation has begun to write: the manifest that says from where on was removed.

    Raises:
        ChainError: names it.
    """
    if manifest.generation in listing.generations():
        raise _missing(manifest.run, manifest.version + 1, manifest.version + 1)


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


def _versions(store: Store, run: str, above: int = 0) -> list[int]:
    after = f"{run}/{ManifestKey(above).path}" if above else ""
    return Listing.of(run, store.list(f"{run}/{MANIFESTS}", after)).versions()


def _latest(store: Store, run: str) -> Manifest | None:
    versions = _versions(store, run)
    if not versions:
        return None
    manifest = read(store, run, versions[-1])
    there = set(versions)
    for version in range(manifest.oldest, manifest.version):
        if version not in there:
            raise _missing(run, version, manifest.version)
    return manifest


def _missing(run: str, version: int, highest: int) -> ChainError:
    return ChainError(
        f"run {run!r}: manifest versions go up to {highest}, but {version} is missing "
        f"({run}/{ManifestKey(version).path})",
        hint="put the removed object back; without it nobody can say which writer owned the log",
    )
