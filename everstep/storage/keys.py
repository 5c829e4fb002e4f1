"""The names of a run's objects: the only place that formats or parses them. Paths are relative to the run.

A data key whose `run` is "" belongs to the run that is looked at; a fork's parent is named.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:=+,-]{0,199}")
MANIFESTS = "manifest/"
EVENTS = "events/"
PINS = "pins/"


def is_name(text: str) -> bool:
    """Whether `text` may name a run, an event, a pin or a base: letters, digits and `_ . @ : = + , -`."""
    return NAME.fullmatch(text) is not None


@dataclass(frozen=True)
class ManifestKey:
    """`manifest/<version>.json`; versions count from 1."""

    version: int

    def __post_init__(self) -> None:
        _demand(self.version >= 1, self)

    @property
    def path(self) -> str:
        """The name relative to the run."""
        return f"{MANIFESTS}{self.version:020d}.json"


@dataclass(frozen=True)
class SegmentKey:
    """The records of lsn `first` to `last`, both included, of one shard, written by one generation."""

    generation: int
    shard: int
    first: int
    last: int
    run: str = ""

    def __post_init__(self) -> None:
        _demand(self.generation >= 1 and self.shard >= 0 and 1 <= self.first <= self.last, self)

    @property
    def path(self) -> str:
        """The name relative to the run."""
        return f"g{self.generation:06d}/log/s{self.shard:04d}/{self.first:012d}-{self.last:012d}.arrow"


@dataclass(frozen=True)
class BaseKey:
    """One shard's state at `lsn`; `id` tells two writings of it apart."""

    generation: int
    shard: int
    lsn: int
    id: str
    run: str = ""

    def __post_init__(self) -> None:
        _demand(self.generation >= 1 and self.shard >= 0 and self.lsn >= 0 and is_name(self.id), self)

    @property
    def path(self) -> str:
        """The name relative to the run."""
        return f"g{self.generation:06d}/base/s{self.shard:04d}/{self.lsn:012d}-{self.id}.arrow"


@dataclass(frozen=True)
class CompressorKey:
    """One slice of the compressor state at `lsn`."""

    generation: int
    lsn: int
    slice: int
    run: str = ""

    def __post_init__(self) -> None:
        _demand(self.generation >= 1 and self.lsn >= 0 and self.slice >= 0, self)

    @property
    def path(self) -> str:
        """The name relative to the run."""
        return f"g{self.generation:06d}/comp/{self.lsn:012d}/r{self.slice:04d}.arrow"


@dataclass(frozen=True)
class EventKey:
    """Something that happened once in the run, such as a fault that fired."""

    name: str

    def __post_init__(self) -> None:
        _demand(is_name(self.name), self)

    @property
    def path(self) -> str:
        """The name relative to the run."""
        return f"{EVENTS}{self.name}.json"


@dataclass(frozen=True)
class PinKey:
    """What a restore or a fork is using."""

    id: str

    def __post_init__(self) -> None:
        _demand(is_name(self.id), self)

    @property
    def path(self) -> str:
        """The name relative to the run."""
        return f"{PINS}{self.id}.json"


Key: TypeAlias = ManifestKey | SegmentKey | BaseKey | CompressorKey | EventKey | PinKey
DataKey: TypeAlias = SegmentKey | BaseKey | CompressorKey

_NUMBERED: tuple[tuple[re.Pattern[str], Callable[..., ManifestKey | SegmentKey | CompressorKey]], ...] = (
    (re.compile(r"manifest/([0-9]{20,})\.json"), ManifestKey),
    (re.compile(r"g([0-9]{6,})/log/s([0-9]{4,})/([0-9]{12,})-([0-9]{12,})\.arrow"), SegmentKey),
    (re.compile(r"g([0-9]{6,})/comp/([0-9]{12,})/r([0-9]{4,})\.arrow"), CompressorKey),
)
_BASE = re.compile(r"g([0-9]{6,})/base/s([0-9]{4,})/([0-9]{12,})-([^/]+)\.arrow")
_NAMED = re.compile(r"(events|pins)/([^/]+)\.json")


@lru_cache(maxsize=1 << 16)  # the same names are listed again and again
def parse(path: str) -> Key | None:
    """Return the key whose `path` is exactly this, or None if there is none."""
    try:
        key = _parse(path)
    except ValueError:
        return None
    return key if key is not None and key.path == path else None


def inside(run: str, key: DataKey) -> str:
    """Return the object's name in the store, for whoever looks at `run`."""
    return f"{key.run or run}/{key.path}"


def generation_of(path: str) -> int | None:
    """Return the generation whose folder the path lies in, whatever the rest looks like, or None."""
    found = re.match(r"g([0-9]{6,})/", path)
    return int(found[1]) if found else None


def facts(key: DataKey) -> dict[str, str | int]:
    """Return what the name alone says about the object's header."""
    if isinstance(key, SegmentKey):
        kind, shard, first, last = "segment", key.shard, key.first, key.last
    elif isinstance(key, BaseKey):
        kind, shard, first, last = "base", key.shard, key.lsn, key.lsn
    else:
        kind, shard, first, last = "compressor", key.slice, key.lsn, key.lsn
    return {"kind": kind, "generation": key.generation, "shard": shard, "first": first, "last": last}


def _parse(path: str) -> Key | None:
    for pattern, kind in _NUMBERED:
        if found := pattern.fullmatch(path):
            return kind(*(int(part) for part in found.groups()))
    if found := _BASE.fullmatch(path):
        return BaseKey(int(found[1]), int(found[2]), int(found[3]), found[4])
    if found := _NAMED.fullmatch(path):
        return EventKey(found[2]) if found[1] == "events" else PinKey(found[2])
    return None


def _demand(valid: bool, key: object) -> None:
    if not valid:
        raise ValueError(f"not the name of an object of a run: {key}")
