"""Which parts of what a run keeps follow each other without a hole: pure functions of a manifest and a listing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.storage.keys import BaseKey, DataKey
from everstep.storage.listing import Listing
from everstep.storage.manifest import Kept, Manifest
from everstep.storage.plan import SegmentUse, counting

Gaps = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Stretch:
    """A base and the records that follow it without a hole, up to `end`."""

    shard: int
    base: BaseKey
    uses: tuple[SegmentUse, ...]
    end: int


@dataclass(frozen=True)
class Hole:
    """The lsns `first` to `last` of a shard, within what is kept, have no record; first 0 = there is no base either."""

    shard: int
    first: int
    last: int


class KeptShard:
    """One shard's part of one range that is kept.

    Args:
        manifest: the run's highest manifest.
        listing: a look at the run's objects.
        shard: its number.
        kept: the range.
        without: objects to leave out, such as damaged ones.
    """

    def __init__(
        self, manifest: Manifest, listing: Listing, shard: int, kept: Kept, without: Collection[DataKey] = ()
    ) -> None:
        bases, uses = counting(manifest, listing, shard)
        self.shard, self.first, self.last = shard, kept.first, kept.last
        self._closing = None if manifest.closing is None else int(manifest.closing["last_lsn"])
        self.bases = tuple(b for b in bases if b not in without and kept.first - 1 <= b.lsn <= self._clipped(b.lsn))
        self._uses = tuple(
            u for u in uses if u.key not in without and kept.first <= u.last and u.first <= self._clipped(u.first)
        )

    def stretch(self, after: int) -> Stretch | None:
        """Return the stretch from the lowest base above lsn `after`; None if there is none."""
        base = next((base for base in self.bases if base.lsn > after), None)
        if base is None:
            return None
        at, chosen = base.lsn, []
        for use in self._uses:
            if use.first <= at + 1 and use.last > at:
                chosen.append(SegmentUse(use.key, at + 1, self._clipped(use.last)))
                at = chosen[-1].last
        return Stretch(self.shard, base, tuple(chosen), at)

    def holes(self) -> list[Hole]:
        """Return where records are missing between the lowest base and the end of the range."""
        end = self.end()
        part = self.stretch(self.first - 2)
        if part is None:
            return [Hole(self.shard, 0, end)]
        found, at = [], part.end
        while at < end:
            later = [use.first for use in self._uses if use.last > at]
            upto = min(later, default=end + 1) - 1
            found.append(Hole(self.shard, at + 1, upto))
            at = self._follow(upto)
        return found

    def end(self) -> int:
        """Return the lsn that the range ends at: its own last, the run's last, or the last that this shard shows."""
        shown = [*(use.last for use in self._uses), *(base.lsn for base in self.bases), self.first - 1]
        limits = [limit for limit in (self.last, self._closing) if limit is not None]
        return min(limits) if limits else max(shown)

    def _follow(self, at: int) -> int:
        for use in self._uses:
            if use.first <= at + 1 and use.last > at:
                at = self._clipped(use.last)
        return at

    def _clipped(self, lsn: int) -> int:
        return lsn if self.last is None else min(lsn, self.last)


def declared(hole: Hole, gaps: Gaps) -> bool:
    """Whether the run itself has said that these records are missing, in one gap or in several that follow."""
    at = hole.first
    for gap in sorted(gaps, key=lambda gap: int(gap.get("first", 1))):
        if int(gap.get("first", 1)) <= at:
            at = max(at, 1 + int(gap.get("last", gap.get("lsn", -1))))
    return hole.first > 0 and at > hole.last
