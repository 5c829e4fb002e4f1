"""The manifest: the numbered, immutable object that names a run's structure. The highest number wins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from everstep.core.errors import CorruptObject, FormatTooNew
from everstep.storage import checked
from everstep.storage.keys import BaseKey, SegmentKey

FORMAT = 2  # 2 names bases, what is kept and what is dropped; 1 is read as if it named nothing

State = Literal["claim", "open", "stopped", "closed", "deleted"]


@dataclass(frozen=True)
class Span:
    """The lsns `first` to `last` of one shard belong to what `generation` wrote; `last` None = still being written.

    `last` == `first` - 1 is a span without segments: only the base that the generation began from. `run` is "" for the
    run's own objects, else the name of the run that a fork has them from.
    """

    generation: int
    shard: int
    first: int
    last: int | None
    run: str = ""

    def wrote(self, key: BaseKey | SegmentKey) -> bool:
        """Whether the object is one that this span's generation wrote of its shard."""
        return (key.run, key.generation, key.shard) == (self.run, self.generation, self.shard)

    def has_base(self, lsn: int) -> bool:
        """Whether a base of this generation and shard at `lsn` belongs to the run's history."""
        return self.first - 1 <= lsn and (self.last is None or lsn <= self.last)


@dataclass(frozen=True)
class CompressorSnapshot:
    """A compressor state of which all `slices` are stored, at one lsn."""

    generation: int
    lsn: int
    slices: int
    run: str = ""


@dataclass(frozen=True)
class Base:
    """A base that was read back and found whole after it was written.

    `round` counts a shard's bases from 0; those of all shards with one number are a round. `crc32c` is the object's
    checksum, `size` in bytes.
    """

    generation: int
    shard: int
    lsn: int
    id: str
    round: int
    crc32c: str
    size: int
    run: str = ""

    @property
    def key(self) -> BaseKey:
        """The name of the object."""
        return BaseKey(self.generation, self.shard, self.lsn, self.id, self.run)


@dataclass(frozen=True)
class Kept:
    """The lsns `first` to `last` (None: to the end) whose segments the run keeps, in every shard."""

    first: int
    last: int | None


@dataclass(frozen=True)
class Origin:
    """Where a fork comes from: step `step` of `run`."""

    run: str
    step: int


@dataclass(frozen=True)
class Manifest:
    """What a run is, at one version.

    Args:
        version: number of this manifest, from 1 without a hole.
        run: the run's name.
        generation: the tenure that wrote it.
        state: "claim" while a takeover is under way, then "open"; "stopped" when it was asked to stop, "closed" when it
            came to its end, "deleted" when only forks still use it.
        lineage: which generation's objects count for which lsns, by shard.
        settings: the effective job settings, plain JSON.
        exactness: "bitwise", "close" or "warm".
        compressor: the complete compressor snapshots, oldest first.
        closing: of a finished run: `last_lsn`, the state's `digest`, and `tails`, by shard the checksum of the segment
            that ends there ("" where the log ends in a base); else None.
        bases: the verified bases that are kept, by shard and lsn.
        kept: the lsns whose segments are kept, ascending.
        dropped: names of own objects that nobody may use any more: they are about to be deleted.
        origin: of a fork, what it was forked from; else None.
        key_id: which key the run's objects are encrypted with; "" for none.
        oldest: the lowest manifest version that has to be there.
        writer: id of the process that wrote it, so that it can recognise its own.
        created: seconds since the epoch.
        format: version of this layout.
    """

    version: int
    run: str
    generation: int
    state: State
    lineage: tuple[Span, ...]
    settings: dict[str, Any]
    exactness: str
    compressor: tuple[CompressorSnapshot, ...] = ()
    closing: dict[str, Any] | None = None
    bases: tuple[Base, ...] = ()
    kept: tuple[Kept, ...] = (Kept(1, None),)
    dropped: tuple[str, ...] = ()
    origin: Origin | None = None
    key_id: str = ""
    oldest: int = 1
    writer: str = ""
    created: float = 0.0
    format: int = field(default=FORMAT)

    @property
    def origins(self) -> tuple[str, ...]:
        """The other runs whose objects this one uses."""
        runs = {span.run for span in self.lineage} | {base.run for base in self.bases}
        runs |= {snapshot.run for snapshot in self.compressor}
        return tuple(sorted(runs - {""}))

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards of the run, in order."""
        return tuple(sorted({span.shard for span in self.lineage}))

    @property
    def never_begun(self) -> bool:
        """Whether it is of a fork that nobody has gone on with."""
        return self.origin is not None and self.generation == 1 and self.state == "open"

    def to_json(self) -> bytes:
        """Return the manifest as indented JSON, with the checksum of everything else as its last entry."""
        body = dict(vars(self))
        body |= {name: [vars(item) for item in body[name]] for name in _LISTS}
        body["origin"] = None if self.origin is None else vars(self.origin)
        return checked.dump(body, indent=2) + b"\n"

    @classmethod
    def from_json(cls, data: bytes | bytearray, *, where: str = "manifest") -> Manifest:
        """Read what `to_json` wrote; `where` is its name, for messages.

        Raises:
            CorruptObject: not JSON, the checksum is wrong, or a field is missing.
            FormatTooNew: intact, but written by a later everstep.
        """
        try:
            body = checked.load(data)
        except ValueError as error:
            raise _corrupt(where, f"expected JSON with a checksum, got {len(data)} bytes ({error})") from error
        if not isinstance(body.get("format"), int) or body["format"] > FORMAT:
            raise FormatTooNew(
                f"{where} has format {body.get('format')!r}; this everstep reads up to {FORMAT}",
                hint="upgrade everstep to read this run",
            )
        try:
            body |= {name: tuple(kind(**item) for item in body[name]) for name, kind in _LISTS.items() if name in body}
            if body.get("origin") is not None:
                body["origin"] = Origin(**body["origin"])
            body["dropped"] = tuple(body.get("dropped", ()))
            return cls(**body | {"format": FORMAT})
        except (KeyError, TypeError) as error:
            raise _corrupt(where, f"its checksum is right but its fields are not a manifest's ({error!r})") from error


_LISTS: dict[str, type] = {"lineage": Span, "compressor": CompressorSnapshot, "bases": Base, "kept": Kept}


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping as JSON gives it back: tuples become lists, keys become strings.

    Raises:
        TypeError: a value that JSON cannot hold.
    """
    return cast(dict[str, Any], json.loads(json.dumps(dict(settings))))


def _corrupt(where: str, what: str) -> CorruptObject:
    return CorruptObject(
        f"{where} is damaged: {what}", hint="restore it from a backup of the store; the log itself is untouched"
    )
