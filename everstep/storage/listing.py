"""What one look at a run's objects showed: a value that plans are made from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from everstep.storage.keys import BaseKey, CompressorKey, DataKey, Key, ManifestKey, SegmentKey, generation_of, parse
from everstep.storage.store import ObjectInfo


@dataclass(frozen=True)
class Listing:
    """A run's objects, sorted by path; `strays` are paths in its folder that name nothing of everstep's."""

    objects: tuple[tuple[Key, ObjectInfo], ...] = ()
    strays: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: str, found: Iterable[ObjectInfo]) -> Listing:
        """Sort what a store listed under `<run>/` into keys and strays, as the run itself sees them."""
        objects: list[tuple[Key, ObjectInfo]] = []
        strays: list[str] = []
        for info in found:
            path = info.key.removeprefix(f"{run}/")
            key = parse(path)
            if key is None:
                strays.append(path)
            else:
                objects.append((key, info))
        return cls(tuple(objects), tuple(strays))

    def joined(self, run: str, other: Listing) -> Listing:
        """Return this listing with the data objects of another run's, which are then named as that run's."""
        foreign = tuple((replace(key, run=run), info) for key, info in other.objects if isinstance(key, DataKey))
        return Listing(self.objects + foreign, self.strays)

    def segments(self, shard: int | None = None) -> list[SegmentKey]:
        """Return the segments, of one shard or all, by generation, shard and first lsn."""
        found = [key for key, _ in self.objects if isinstance(key, SegmentKey) and shard in (None, key.shard)]
        return sorted(found, key=lambda key: (key.run, key.generation, key.shard, key.first, key.last))

    def bases(self, shard: int | None = None) -> list[BaseKey]:
        """Return the bases, of one shard or all, by generation, shard and lsn."""
        found = [key for key, _ in self.objects if isinstance(key, BaseKey) and shard in (None, key.shard)]
        return sorted(found, key=lambda key: (key.run, key.generation, key.shard, key.lsn, key.id))

    def compressor(self) -> list[CompressorKey]:
        """Return the slices of compressor snapshots, by generation, lsn and slice."""
        found = [key for key, _ in self.objects if isinstance(key, CompressorKey)]
        return sorted(found, key=lambda key: (key.run, key.generation, key.lsn, key.slice))

    def versions(self) -> list[int]:
        """Return the manifest versions, ascending."""
        return sorted(key.version for key, _ in self.objects if isinstance(key, ManifestKey))

    def generations(self) -> list[int]:
        """Return the generations that have a folder, strays included, ascending."""
        paths = [key.path for key, _ in self.objects if not getattr(key, "run", "")] + list(self.strays)
        return sorted({found for path in paths if (found := generation_of(path)) is not None})

    def bytes_of(self, kind: type[Key]) -> int:
        """Return the stored bytes of all own objects of one class of key."""
        return sum(info.size for key, info in self.objects if isinstance(key, kind) and not getattr(key, "run", ""))
