"""Proving a stored run: each object against its checksum, and what objects say of each other.

Nothing here raises over what is wrong: problems are returned, all of them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from everstep.core.errors import ChainError, CorruptObject, ObjectMissing
from everstep.storage import events, manifests, pins
from everstep.storage.chain import Chain
from everstep.storage.keys import CompressorKey, DataKey, EventKey, ManifestKey, PinKey, SegmentKey, inside
from everstep.storage.listing import Listing
from everstep.storage.manifest import Manifest
from everstep.storage.plan import counting
from everstep.storage.store import Store
from everstep.storage.stretches import KeptShard, declared

READERS = 8  # at a time: an object store answers slowly and takes many questions
PUT_BACK = "put it back from a copy of the store"


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        object: the name in the store of what it is about.
        what: what is wrong with it.
        hint: what to do; "" if the others' hints say it.
    """

    object: str
    what: str
    hint: str = ""

    @property
    def line(self) -> str:
        """Both in one line."""
        return self.what if self.object in self.what else f"{self.object}: {self.what}"


@dataclass(frozen=True)
class Proved:
    """What an intact object says: its checksum, its size in bytes, the checksum of the one before ("" if unknown)."""

    crc32c: str
    size: int
    parent: str


def newest(store: Store, run: str) -> tuple[Manifest | None, list[Problem]]:
    """Read every manifest of a run; return the highest that can be read, and what is wrong with them."""
    listing = Listing.of(run, store.list(f"{run}/"))
    versions, good, failed = listing.versions(), {}, {}
    for version in versions:
        try:
            good[version] = manifests.read(store, run, version)
        except ObjectMissing:
            continue  # collected since; a hole if it should not have been
        except ChainError as error:
            failed[version] = Problem(_manifest(run, version), error.message, error.hint)
    found = list(failed.values())
    if not good:
        return None, found or [Problem(f"{run}/manifest/", "no manifest can be found", PUT_BACK)]
    top = good[max(good)]
    for version in range(top.oldest, max(versions)):
        if version not in good and version not in failed:
            found.append(Problem(_manifest(run, version), "is missing: versions have no hole", PUT_BACK))
    for before, after in ((good[v], good[v + 1]) for v in good if v + 1 in good):
        new = after.state in ("claim", "deleted")
        if after.generation not in (before.generation, before.generation + new):
            what = f"has generation {after.generation} after {before.generation}: each begins with a claim"
            found.append(Problem(_manifest(run, after.version), what, PUT_BACK))
    return top, found + _beyond(top, listing)


def _beyond(top: Manifest, listing: Listing) -> list[Problem]:
    """Return what shows that there was a later manifest than the highest."""
    found = []
    try:
        manifests.check_generations(top.run, listing, top.generation)
        if top.state == "claim":
            manifests.check_claim(top, listing)
    except ChainError as error:
        found.append(Problem(_manifest(top.run, top.version + 1), error.message, error.hint))
    for name in (key.name for key, _ in listing.objects if isinstance(key, EventKey)):
        version, generation = re.fullmatch(r"summary-(\d+)", name), re.fullmatch(r".+-g(\d{6,})", name)
        missing = int(version[1]) if version and int(version[1]) > top.version else 0
        if missing or (generation and int(generation[1]) > top.generation):
            of = f"manifest {missing}" if missing else f"generation {int(generation[1]) if generation else 0}"
            where = _manifest(top.run, missing or top.version + 1)
            what = f"is missing: event {name} is of {of}, the highest manifest has version {top.version}"
            found.append(Problem(where, f"{what}, generation {top.generation}", PUT_BACK))
    return found


def used(manifest: Manifest, listing: Listing) -> set[DataKey]:
    """Return the data objects that the run's lineage and manifest use, of other runs too."""
    keys: set[DataKey] = {base.key for base in manifest.bases}
    for shard in manifest.shards:
        bases, uses = counting(manifest, listing, shard)
        keys |= {*bases, *(use.key for use in uses)}
    for snapshot in manifest.compressor:
        keys |= {CompressorKey(snapshot.generation, snapshot.lsn, n, snapshot.run) for n in range(snapshot.slices)}
    return keys


def prove(
    chain: Chain, keys: Iterable[DataKey], needed: Collection[DataKey]
) -> tuple[dict[DataKey, Proved], list[Problem]]:
    """Read objects; return what the intact ones say. One that is gone is a problem only if it is needed."""
    found: dict[DataKey, Proved] = {}
    problems: list[Problem] = []

    def look(key: DataKey) -> Proved | ChainError | ObjectMissing:
        try:
            stored = chain.read(key)
        except (ChainError, ObjectMissing) as error:
            return error
        return Proved(stored.crc, stored.size, stored.header.parent)

    ordered = sorted(keys, key=lambda key: inside(chain.run, key))
    with ThreadPoolExecutor(READERS, "verify") as pool:
        for key, answer in zip(ordered, pool.map(look, ordered), strict=True):
            if isinstance(answer, Proved):
                found[key] = answer
            elif key in needed or not isinstance(answer, ObjectMissing):
                problems.append(Problem(inside(chain.run, key), answer.message, answer.hint))
    return found, problems


def notes(chain: Chain, listing: Listing) -> list[Problem]:
    """Return what is wrong with events and pins."""
    found = []
    for key, _ in listing.objects:
        if not isinstance(key, EventKey | PinKey):
            continue
        where = f"{chain.run}/{key.path}"
        try:
            data = bytes(chain.store.get(where))
            if isinstance(key, EventKey):
                events.decode(data, name=key.name, where=where)
            else:
                pins.decode(data, where=where)
        except ObjectMissing:
            continue  # a restore that has ended
        except CorruptObject as error:
            found.append(Problem(where, error.message, error.hint))
    return found


def named(manifest: Manifest, listing: Listing, proved: Mapping[DataKey, Proved]) -> list[Problem]:
    """Return what is wrong with the bases and compressor snapshots that the manifest names."""
    there = {key for key, _ in listing.objects if isinstance(key, DataKey)}
    found = []
    for base in manifest.bases:
        where, stored = inside(manifest.run, base.key), proved.get(base.key)
        if base.key not in there:
            found.append(Problem(where, f"is missing: manifest {manifest.version} names it", PUT_BACK))
        elif stored and (stored.crc32c, stored.size) != (base.crc32c, base.size):
            found.append(
                Problem(
                    where,
                    f"is another object than manifest {manifest.version} names: expected crc32c {base.crc32c}, "
                    f"{base.size} bytes, got {stored.crc32c}, {stored.size} bytes",
                    PUT_BACK,
                )
            )
    for snapshot in manifest.compressor:
        slices = [CompressorKey(snapshot.generation, snapshot.lsn, n, snapshot.run) for n in range(snapshot.slices)]
        for key in slices:
            if key not in there:
                what = f"is missing: one of {snapshot.slices} slices of the compressor snapshot at {snapshot.lsn}"
                found.append(Problem(inside(manifest.run, key), what, PUT_BACK))
    return found


def parents(run: str, proved: Mapping[DataKey, Proved]) -> list[Problem]:
    """Return the segments that do not follow the one before them: one of the two was replaced."""
    ends: dict[tuple[str, int, int, int], set[str]] = {}
    for key, stored in proved.items():
        if isinstance(key, SegmentKey):
            ends.setdefault((key.run, key.generation, key.shard, key.last), set()).add(stored.crc32c)
    found = []
    for key, stored in proved.items():
        if isinstance(key, SegmentKey) and stored.parent:
            before = ends.get((key.run, key.generation, key.shard, key.first - 1), set())
            if before and stored.parent not in before:
                seen = ", ".join(sorted(before))
                what = f"follows a segment with checksum {stored.parent}, but the one before it has {seen}"
                found.append(Problem(inside(run, key), what, f"one of the two was replaced: {PUT_BACK}"))
    return found


def tails(manifest: Manifest, listing: Listing, proved: Mapping[DataKey, Proved]) -> list[Problem]:
    """Return the shards of a finished run whose last segment is another than the one that it ended with.

    One that is missing is for `holes` to find: it may have been collected.
    """
    if manifest.closing is None:
        return []
    last, found = int(manifest.closing["last_lsn"]), []
    for shard, crc in sorted((int(s), crc) for s, crc in manifest.closing.get("tails", {}).items()):
        ending = [use.key for use in counting(manifest, listing, shard)[1] if use.last == last]
        seen = [proved[key].crc32c for key in ending if key in proved]
        if crc and seen and crc not in seen:
            what = f"shard {shard} ends with a segment of checksum {', '.join(seen)}, the run ended with {crc}"
            found.append(Problem(inside(manifest.run, ending[0]), what, PUT_BACK))
    return found


def holes(manifest: Manifest, listing: Listing, gaps: Sequence[Mapping[str, object]]) -> list[Problem]:
    """Return where a shard lacks records within a range that is kept; gaps that the run declared are none."""
    found = []
    for kept in manifest.kept:
        for shard in manifest.shards:
            for hole in KeptShard(manifest, listing, shard, kept).holes():
                where = f"{manifest.run}/shard {shard}"
                if hole.first == 0:
                    what = f"no base at lsn {kept.first - 1} to {hole.last}, a range that the run keeps"
                    found.append(Problem(where, what, PUT_BACK))
                elif not declared(hole, gaps):
                    what = f"expected segments for lsn {hole.first} to {hole.last}, got none"
                    found.append(Problem(where, what, "put the missing objects back; other steps can be restored"))
    return found


def _manifest(run: str, version: int) -> str:
    return f"{run}/{ManifestKey(version).path}"
