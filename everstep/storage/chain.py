"""One run in one store: create it, open it, take it over, append to it, read it.

A writer trusts its tenure only as far as its last look: it puts an object, looks for a foreign manifest
(`check_tenure`), and only then counts the object as durable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pyarrow as pa

from everstep.core import clock
from everstep.core.errors import ChainError, RunExists, SettingsError, StoreError, UnknownName
from everstep.core.ids import new_id
from everstep.core.registry import nearest
from everstep.storage import events, manifests
from everstep.storage.keys import BaseKey, CompressorKey, DataKey, ManifestKey, SegmentKey, facts, is_name, parse
from everstep.storage.listing import Listing
from everstep.storage.manifest import Manifest, Span, plain
from everstep.storage.objects import Header, StoredObject, crc_of, decode, encode
from everstep.storage.store import Store
from everstep.storage.takeover import Cut, clips, cut_compressor, cut_lineage

__all__ = ["Chain", "Listing"]

_TRIES = 32  # each lost race means that somebody else got further, so this many in a row is no race


class Chain:
    """One run's log in one store, as of `manifest`. Made by `create`, `open`, `take_over` or `attach`.

    Args:
        store: where the run lives.
        run: its name.
        manifest: the highest manifest this object has seen.
    """

    def __init__(self, store: Store, run: str, manifest: Manifest) -> None:
        self.store = store
        self.run = run
        self.manifest = manifest
        self._writer = new_id()
        self._tails: dict[int, dict[int, str]] = {}  # by shard: checksums of the segments written, by last lsn

    @staticmethod
    def runs(store: Store) -> list[str]:
        """Return the names of the runs that have a manifest, sorted."""
        names = (info.key.partition("/") for info in store.list(""))
        return sorted({run for run, _, path in names if isinstance(parse(path), ManifestKey)})

    @classmethod
    def create(cls, store: Store, run: str, *, settings: Mapping[str, Any], shards: int, exactness: str) -> Chain:
        """Start a run: generation 1, whose lineage is one open span a shard from lsn 1.

        Raises:
            RunExists: there is a run of that name.
            SettingsError: the name cannot be one.
            ChainError: objects of a run lie there without a manifest.
        """
        if not is_name(run):
            raise SettingsError(
                f"run name {run!r}: expected 1 to 200 letters, digits or _ . @ : = + , -", hint="change run.name"
            )
        listing = Listing.of(run, store.list(f"{run}/"))
        if not listing.versions():
            manifests.check_generations(run, listing, 0)
        lineage = tuple(Span(1, shard, 1, None) for shard in range(shards))
        chain = cls(store, run, Manifest(1, run, 1, "open", lineage, plain(settings), exactness))
        chain.manifest = replace(chain.manifest, writer=chain._writer, created=clock.wall())
        if listing.versions() or not manifests.create(store, chain.manifest):
            raise RunExists(f"run {run!r} exists already in {store.url}", hint="resume it, or choose another run.name")
        return chain

    @classmethod
    def open(cls, store: Store, run: str) -> Chain:
        """Open a run as its highest manifest describes it, to read or to take over.

        Raises:
            UnknownName: no run of that name.
            ChainError: a hole in the manifest versions, or objects of a generation that no manifest knows.
        """
        # Objects first: whoever wrote one had made its manifest before.
        listing = Listing.of(run, store.list(f"{run}/"))
        manifest = manifests.latest(store, run)
        manifests.check_generations(run, listing, manifest.generation if manifest else 0)
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
        chain._claim()
        listing = chain.listing()  # after the claim: a fenced writer's later objects lie behind the cut
        clip = clips(chain.manifest, listing, cut=cut, at=at)
        chain.update(
            state="open",
            lineage=cut_lineage(chain.manifest, listing, chain.manifest.generation, clip),
            settings=chain.manifest.settings if settings is None else plain(settings),
            exactness=exactness or chain.manifest.exactness,
            compressor=cut_compressor(chain.manifest, cut, clip),
            closing=None,
        )
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
        crc = self._put(key, batches, parent=tails.get(first - 1, ""))
        self._tails[shard] = {end: tail for end, tail in tails.items() if end >= first - 1} | {last: crc}
        return key

    def put_base(self, shard: int, lsn: int, batches: Sequence[pa.RecordBatch]) -> BaseKey:
        """Store one shard's state at `lsn`, under a fresh id. Raises as `put_segment`."""
        key = BaseKey(self.manifest.generation, shard, lsn, new_id())
        self._put(key, batches)
        return key

    def put_compressor(
        self, lsn: int, slice: int, batches: Sequence[pa.RecordBatch], extra: Mapping[str, str]
    ) -> CompressorKey:
        """Store one slice of the compressor state at `lsn`; `extra` goes into its header. Raises as `put_segment`."""
        key = CompressorKey(self.manifest.generation, lsn, slice)
        self._put(key, batches, extra=extra)
        return key

    def check_tenure(self) -> None:
        """Look for a newer generation; adopt newer manifests of the own one.

        Raises:
            Fenced: there is a newer generation.
            ChainError: the manifests were removed.
        """
        if manifests.highest(self.store, self.run) != self.manifest.version:
            self._adopt(manifests.latest(self.store, self.run))

    def update(self, **changes: Any) -> Manifest:
        """Write the next manifest of the own generation, with these fields changed.

        Raises:
            Fenced: a newer generation owns the log.
            StoreError: the store failed.
        """
        for _ in range(_TRIES):
            if self._write_next(changes):
                return self.manifest
            self._adopt(manifests.latest(self.store, self.run))
        raise manifests.lost_races(self.run, _TRIES)

    def add_event(self, name: str, body: Mapping[str, Any]) -> bool:
        """Store that something happened, once in the run; False if that is stored already."""
        return events.add(self.store, self.run, name, body)

    def events(self) -> dict[str, dict[str, Any]]:
        """Return the body of every event, by name."""
        return events.read_all(self.store, self.run)

    def listing(self) -> Listing:
        """Look at all objects of the run."""
        return Listing.of(self.run, self.store.list(f"{self.run}/"))

    def read(self, key: DataKey) -> StoredObject:
        """Fetch and verify an object, its header against what its name says.

        Raises:
            ObjectMissing: there is no such object.
            CorruptObject: it is damaged, or belongs elsewhere.
            FormatTooNew: a later everstep wrote it.
        """
        where = f"{self.run}/{key.path}"
        return decode(self.store.get(where), where=where, expect={"run": self.run, **facts(key)})

    def _put(self, key: DataKey, batches: Sequence[pa.RecordBatch], **more: Any) -> str:
        """Create the object and return its checksum."""
        header = Header(run=self.run, **cast(dict[str, Any], facts(key)), **more)
        data = encode(header, batches)
        if not manifests.create_object(self.store, f"{self.run}/{key.path}", data):
            self.check_tenure()
            raise StoreError(
                f"{self.store.url}: object {self.run}/{key.path} exists with other content; generation "
                f"{key.generation} must have one writer a shard",
                hint="take the run over (everstep resume) so that one writer owns it",
            )
        return crc_of(data)

    def _claim(self) -> None:
        for _ in range(_TRIES):
            if self._write_next({"generation": self.manifest.generation + 1, "state": "claim"}):
                return
            self.manifest = manifests.latest(self.store, self.run) or self.manifest
        raise manifests.lost_races(self.run, _TRIES)

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
