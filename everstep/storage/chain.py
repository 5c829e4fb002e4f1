"""One run in one store: create it, open it, take it over, append to it, read it.

A writer trusts its tenure only as far as its last look: it puts an object, looks for a foreign manifest
(`check_tenure`), and only then counts the object as durable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import pyarrow as pa

from everstep.core import clock
from everstep.core.errors import ChainError, CorruptObject, RunExists, SettingsError, StoreError, UnknownName
from everstep.core.ids import new_id
from everstep.core.registry import nearest
from everstep.storage import events, manifests
from everstep.storage.keys import BaseKey, CompressorKey, DataKey, SegmentKey, facts, inside, is_name
from everstep.storage.listing import Listing
from everstep.storage.manifest import Base, CompressorSnapshot, Manifest, Span, plain
from everstep.storage.naming import with_bases, with_snapshots
from everstep.storage.objects import Header, StoredObject, crc_of, decode, encode
from everstep.storage.store import Pace, Store
from everstep.storage.takeover import Cut, clips, cut_changes

__all__ = ["Chain", "Listing"]

_TRIES = 32  # each lost race means that somebody else got further, so this many in a row is no race


K = TypeVar("K", bound=DataKey)


@dataclass(frozen=True)
class Encoded(Generic[K]):
    """An object that is ready to be put: its name and its bytes."""

    key: K
    data: pa.Buffer


class Chain:
    """One run's log in one store, as of `manifest`. Made by `create`, `open`, `take_over` or `attach`.

    Args:
        store: where the run lives.
        run: its name.
        manifest: the highest manifest this object has seen.
    """

    def __init__(self, store: Store, run: str, manifest: Manifest) -> None:
        self.store = _sealed(store, manifest.key_id)
        self.run = run
        self.manifest = manifest
        self._writer = new_id()
        self._lock = threading.RLock()  # one update at a time
        self._tails: dict[int, dict[int, str]] = {}  # by shard: checksums of the segments written, by last lsn

    @classmethod
    def runs(cls, store: Store) -> list[str]:
        """Return the names of the runs that have a manifest, sorted."""
        return [name for name in store.tops() if is_name(name) and cls.exists(store, name)]

    @staticmethod
    def exists(store: Store, run: str) -> bool:
        """Whether there is a run of this name, a deleted one included that forks still use."""
        return manifests.any_of(store, run)

    @classmethod
    def create(
        cls, store: Store, run: str, *, settings: Mapping[str, Any], shards: int, exactness: str, key_id: str = ""
    ) -> Chain:
        """Start a run: generation 1, whose lineage is one open span a shard from lsn 1.

        Args:
            store: where it shall live.
            run: its name.
            settings: the effective job settings.
            shards: how many, the step's own included.
            exactness: what a replay promises.
            key_id: which key encrypts its objects (`storage.encrypted`); "" for none.

        Raises:
            RunExists: there is a run of that name.
            SettingsError: the name cannot be one.
            ChainError: objects of a run lie there without a manifest.
        """
        lineage = tuple(Span(1, shard, 1, None) for shard in range(shards))
        return cls.found(store, Manifest(1, run, 1, "open", lineage, plain(settings), exactness, key_id=key_id))

    @classmethod
    def found(cls, store: Store, first: Manifest) -> Chain:
        """Start a run with this manifest as its first. Raises as `create`."""
        run = first.run
        if not is_name(run):
            raise SettingsError(
                f"run name {run!r}: expected 1 to 200 letters, digits or _ . @ : = + , -", hint="change run.name"
            )
        listing = Listing.of(run, store.list(f"{run}/"))
        if not listing.versions():
            manifests.check_generations(run, listing, 0)
        chain = cls(store, run, first)
        chain.manifest = replace(first, writer=chain._writer, created=clock.wall())
        if listing.versions() or not manifests.create(store, chain.manifest):
            raise _exists(store, run)
        return chain

    @classmethod
    def open(cls, store: Store, run: str, *, deleted_too: bool = False) -> Chain:
        """Open a run as its highest manifest describes it, to read or to take over.

        Args:
            store: where it lives.
            run: its name.
            deleted_too: open it also if it was deleted and only waits for forks to let go of it.

        Raises:
            UnknownName: no run of that name.
            ChainError: a hole in the manifest versions, or objects of a generation that no manifest knows.
        """
        # Objects first: whoever wrote one had made its manifest before.
        listing = Listing.of(run, store.list(f"{run}/"))
        manifest = manifests.latest(store, run)
        manifests.check_generations(run, listing, manifest.generation if manifest else 0)
        if manifest is not None and manifest.state == "claim":
            manifests.check_claim(manifest, listing)
        if manifest is not None and manifest.state == "deleted" and not deleted_too:
            raise _gone(store, run)
        if manifest is None:
            known = cls.runs(store)
            close = nearest(run, known)
            raise UnknownName(
                f"no run {run!r} in {store.url}; known: {', '.join(known) or 'none'}",
                hint=f"did you mean {close!r}?" if close else "check run.name and run.store",
            )
        return cls(store, run, manifest)

    @classmethod
    def take_over(
        cls,
        store: Store,
        run: str,
        *,
        cut: Cut,
        at: int | None = None,
        settings: Mapping[str, Any] | None = None,
        exactness: str | None = None,
    ) -> Chain:
        """Fence every writer of the run and continue it as a new generation.

        Args:
            store: where the run lives.
            run: its name.
            cut: "common" = every shard is cut at the highest step all reach; "each" = every shard at its own last.
            at: with "common", cut there if it is lower.
            settings: the new effective settings; None = as before.
            exactness: None = as before.

        Returns:
            The new generation's writer; its lineage says where each shard goes on.

        Raises:
            Fenced: another takeover was faster.
            ChainError: the log cannot be restored at the cut; nobody was fenced if it was so from the start.
        """
        chain = cls.open(store, run)
        clips(chain.manifest, chain.listing(), cut=cut, at=at)
        chain.fence()
        listing = chain.listing()  # after the claim: a fenced writer's later objects lie behind the cut
        clip = clips(chain.manifest, listing, cut=cut, at=at)
        changes = cut_changes(chain.manifest, listing, cut, clip)
        if settings is not None:
            changes["settings"] = plain(settings)
        if exactness is not None:
            changes["exactness"] = exactness
        chain.update(state="open", **changes)
        return chain

    @classmethod
    def attach(cls, store: Store, run: str, generation: int) -> Chain:
        """Return one more writer of a generation that another process began.

        Raises:
            Fenced: a newer generation owns the log.
            ChainError: the generation has not begun.
        """
        chain = cls.open(store, run)
        if chain.manifest.generation > generation:
            raise manifests.fenced(generation, chain.manifest)
        if chain.manifest.generation < generation:
            raise ChainError(
                f"run {run!r}: expected generation {generation}, got {chain.manifest.generation} in the highest "
                f"manifest (version {chain.manifest.version})",
                hint="attach only after the takeover has returned",
            )
        return chain

    def put_segment(self, shard: int, first: int, last: int, batches: Sequence[pa.RecordBatch]) -> SegmentKey:
        """Store the records of lsn `first` to `last`.

        Raises:
            Fenced: a newer generation owns the log.
            StoreError: the store failed, or another object has the name.
        """
        key = SegmentKey(self.manifest.generation, shard, first, last)
        tails = self._tails.get(shard, {})  # by lsn, so that a repeated put has the same parent and the same bytes
        crc = self.put(self._encoded(key, batches, parent=tails.get(first - 1, "")))
        self._tails[shard] = {end: tail for end, tail in tails.items() if end >= first - 1} | {last: crc}
        return key

    def tails(self) -> dict[int, tuple[int, str]]:
        """Return, by shard, last lsn and checksum of the last segment that this object wrote."""
        return {shard: max(written.items()) for shard, written in dict(self._tails).items() if written}

    def put_base(self, shard: int, lsn: int, batches: Sequence[pa.RecordBatch]) -> BaseKey:
        """Store one shard's state at `lsn`, under a fresh id. Raises as `put_segment`."""
        base = self.prepare_base(shard, lsn, batches)
        self.put(base)
        return base.key

    def prepare_base(self, shard: int, lsn: int, batches: Sequence[pa.RecordBatch]) -> Encoded[BaseKey]:
        """Return one shard's state at `lsn` as an object to `put`, under a fresh id; the batches are copied."""
        return self._encoded(BaseKey(self.manifest.generation, shard, lsn, new_id()), batches)

    def put(self, encoded: Encoded[Any], *, pace: Pace | None = None) -> str:
        """Store an encoded object, as fast as `pace` lets it, and return its checksum. Raises as `put_segment`."""
        where = inside(self.run, encoded.key)
        if not manifests.create_object(self.store, where, encoded.data, pace=pace):
            self.check_tenure()
            raise StoreError(
                f"{self.store.url}: object {where} exists with other content; generation "
                f"{encoded.key.generation} must have one writer a shard",
                hint="take the run over (everstep resume) so that one writer owns it",
            )
        return crc_of(encoded.data)

    def proved(self, key: BaseKey) -> Base:
        """Read a base back and return what a manifest says of it, but for its round. Raises as `read`."""
        stored = self.read(key)
        return Base(key.generation, key.shard, key.lsn, key.id, -1, stored.crc, stored.size)

    def name_bases(self, proved: Iterable[Base]) -> None:
        """Name bases in the manifest, each in its shard's next round, or in the newest of any shard if that is later.

        What was dropped or cut off is left out, and what is not newer than the shard's newest. Raises as `update`.
        """
        found = tuple(proved)
        self.update(lambda manifest: with_bases(manifest, found))

    def name_snapshots(self, complete: Iterable[CompressorSnapshot]) -> None:
        """Name compressor snapshots of the own generation, all of whose slices are stored. Raises as `update`."""
        found = tuple(complete)
        self.update(lambda manifest: with_snapshots(manifest, found))

    def put_compressor(
        self, lsn: int, slice: int, batches: Sequence[pa.RecordBatch], extra: Mapping[str, str]
    ) -> CompressorKey:
        """Store one slice of the compressor state at `lsn`; `extra` goes into its header. Raises as `put_segment`."""
        key = CompressorKey(self.manifest.generation, lsn, slice)
        self.put(self._encoded(key, batches, extra=extra))
        return key

    def fence(self, change: Callable[[Manifest], Mapping[str, Any]] | None = None) -> None:
        """Claim the next generation: every writer of the run finds out before it acknowledges anything more.

        Args:
            change: returns what else to change in the manifest.

        Raises:
            UnknownName: the run was deleted meanwhile.
            StoreError: the store failed.
        """
        for _ in range(_TRIES):
            more = change(self.manifest) if change else {}
            if self._write_next({"generation": self.manifest.generation + 1, "state": "claim", **more}):
                return
            latest = manifests.latest(self.store, self.run)
            if latest is None or latest.state == "deleted":
                raise _gone(self.store, self.run)
            self.manifest = latest
        raise manifests.lost_races(self.run, _TRIES)

    def check_tenure(self) -> None:
        """Look for a newer generation; adopt newer manifests of the own one.

        Raises:
            Fenced: there is a newer generation.
            ChainError: the manifests were removed.
        """
        if not manifests.is_highest(self.store, self.run, self.manifest.version):
            self._adopt(manifests.latest(self.store, self.run))

    def update(self, change: Callable[[Manifest], Mapping[str, Any]] | None = None, **changes: Any) -> Manifest:
        """Write the next manifest of the own generation, with some fields changed.

        Args:
            change: returns what to change in a manifest; asked again when another was faster. Nothing: none is written.
            changes: fields with their new values, whatever they were.

        Raises:
            Fenced: a newer generation owns the log.
            StoreError: the store failed.
        """
        with self._lock:
            for _ in range(_TRIES):
                wanted = {**(change(self.manifest) if change else {}), **changes}
                if (change and not wanted) or self._write_next(wanted):
                    return self.manifest
                self._adopt(manifests.latest(self.store, self.run))
        raise manifests.lost_races(self.run, _TRIES)

    def add_event(self, name: str, body: Mapping[str, Any]) -> bool:
        """Store that something happened, once in the run; False if that is stored already."""
        return events.add(self.store, self.run, name, body)

    def events(self, prefix: str = "") -> dict[str, dict[str, Any]]:
        """Return the body of every event whose name starts with `prefix`, by name."""
        return events.read_all(self.store, self.run, prefix)

    def listing(self) -> Listing:
        """Look at all objects of the run, and at those of the runs that it was forked from."""
        own = Listing.of(self.run, self.store.list(f"{self.run}/"))
        for run in self.manifest.origins:
            own = own.joined(run, Listing.of(run, self.store.list(f"{run}/g")))
        return own

    def read(self, key: DataKey) -> StoredObject:
        """Fetch and verify an object, its header against what its name says.

        Raises:
            ObjectMissing: there is no such object.
            CorruptObject: it is damaged, or belongs elsewhere.
            FormatTooNew: a later everstep wrote it.
        """
        where = inside(self.run, key)
        stored = decode(self.store.get(where), where=where, expect={"run": key.run or self.run, **facts(key)})
        if isinstance(key, BaseKey):
            self._check_named(key, stored.crc)
        return stored

    def _check_named(self, key: BaseKey, crc: str) -> None:
        named = next((base.crc32c for base in self.manifest.bases if base.key == key), crc)
        if named != crc:
            raise CorruptObject(
                f"object {inside(self.run, key)} is another than manifest {self.manifest.version} names: expected "
                f"checksum {named}, got {crc}",
                hint="put the right one back from a copy of the store; an older round can still be restored",
            )

    def _encoded(self, key: K, batches: Sequence[pa.RecordBatch], **more: Any) -> Encoded[K]:
        return Encoded(key, encode(Header(run=self.run, **cast(dict[str, Any], facts(key)), **more), batches))

    def _write_next(self, changes: Mapping[str, Any]) -> bool:
        following = {"version": self.manifest.version + 1, "writer": self._writer, "created": clock.wall()}
        manifest: Manifest = replace(self.manifest, **{**following, **changes})
        if not manifests.create(self.store, manifest):
            return False
        self.manifest = manifest
        return True

    def _adopt(self, latest: Manifest | None) -> None:
        if latest is None or latest.version < self.manifest.version:
            raise ChainError(
                f"run {self.run!r}: expected manifest {self.manifest.version} or later in {self.store.url}, "
                f"got {latest.version if latest else 'none'}",
                hint="put the removed manifests back, or start the run again under another name",
            )
        if latest.generation > self.manifest.generation:
            raise manifests.fenced(self.manifest.generation, latest)
        self.manifest = latest


def _sealed(store: Store, key_id: str) -> Store:
    """Return the store as a run sees it whose objects are encrypted with this key ("" for none)."""
    if not key_id:
        return store
    from everstep.storage.encrypted import sealed  # cryptography, for those who use it

    return sealed(store, key_id)


def _exists(store: Store, run: str) -> RunExists:
    manifest = manifests.latest(store, run)
    if manifest is not None and manifest.state == "deleted":
        return RunExists(
            f"run {run!r} in {store.url} was deleted, but what forks of it use is still there under its name",
            hint="choose another run.name; this one is free when the forks have gone and it was deleted once more",
        )
    return RunExists(f"run {run!r} exists already in {store.url}", hint="resume it, or choose another run.name")


def _gone(store: Store, run: str) -> UnknownName:
    return UnknownName(
        f"run {run!r} in {store.url} was deleted; only what forks of it use is left of it",
        hint="check run.name, or use one of the forks",
    )
