"""Named points at which an operation on a chain is stopped: it dies there, or others act before it goes on."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from everstep.storage.collect import POINTS as GC_POINTS
from everstep.storage.store import Buffer, ObjectInfo, Pace, Store

T = TypeVar("T")


class Died(BaseException):
    """The process is gone: nothing it would still do has any effect."""


@dataclass(frozen=True)
class Point:
    """Just before or after the `nth` time that `verb` is called with a key that the pattern matches."""

    name: str
    verb: str
    pattern: str
    when: str = "before"
    nth: int = 1

    @property
    def operation(self) -> str:
        return self.name.partition(":")[0]


MANIFEST, PIN, DATA = r"/manifest/", r"/pins/", r"/g0"

POINTS = (
    Point("commit:before_put", "put", "/log/"),
    Point("commit:lost_answer", "put", "/log/", "after"),
    Point("commit:before_check", "list", MANIFEST),
    Point("commit:after_check", "list", MANIFEST, "after"),
    Point("merge:before_put", "put", "/base/"),
    Point("merge:base_put", "put", "/base/", "after"),
    Point("merge:before_proof", "get", "/base/"),
    Point("merge:before_name", "put", MANIFEST),
    Point("merge:name_lost_answer", "put", MANIFEST, "after"),
    Point("merge:named", "list", MANIFEST, "after"),
    Point("snapshot:before_put", "put", "/comp/"),
    Point("snapshot:between_slices", "put", "/comp/", "after"),
    Point("snapshot:before_name", "put", MANIFEST),
    Point("snapshot:name_lost_answer", "put", MANIFEST, "after"),
    Point("takeover:before_claim", "put", MANIFEST),
    Point("takeover:claim_lost_answer", "put", MANIFEST, "after"),
    Point("takeover:after_claim", "list", r"^\w+/$", nth=3),  # open, the look before, the look after
    Point("takeover:looked", "list", r"^\w+/$", "after", nth=3),
    Point("takeover:before_manifest", "put", MANIFEST, nth=2),
    Point("takeover:after_manifest", "put", MANIFEST, "after", nth=2),
    *(Point(f"gc:{name}", "at", f"^{name}$") for name in GC_POINTS),
    Point("gc:before_drop", "put", MANIFEST),
    Point("gc:drop_lost_answer", "put", MANIFEST, "after"),
    Point("gc:second_delete", "delete", DATA, nth=2),
    Point("gc:manifest_deleted", "delete", MANIFEST, "after"),
    Point("gc:pin_deleted", "delete", PIN, "after"),
    Point("fork:before_pin", "put", PIN),
    Point("fork:after_pin", "put", PIN, "after"),
    Point("fork:before_manifest", "put", MANIFEST),
    Point("fork:manifest_lost_answer", "put", MANIFEST, "after"),
    Point("fork:founded", "list", MANIFEST, "after", nth=3),
    Point("fork:before_unpin", "delete", PIN),
    Point("hold:before_pin", "put", PIN),
    Point("hold:after_pin", "put", PIN, "after"),
    Point("hold:reading", "get", DATA),
    Point("hold:before_unpin", "delete", PIN),
    Point("read:reading", "get", DATA),
    Point("delete:before_manifest", "put", MANIFEST),
    Point("delete:manifest_lost_answer", "put", MANIFEST, "after"),
    Point("delete:before_drop", "put", MANIFEST, nth=2),
    Point("delete:object", "delete", DATA),
    Point("delete:object_lost_answer", "delete", DATA, "after"),
    Point("delete:manifest", "delete", MANIFEST),
    Point("delete:manifest_deleted", "delete", MANIFEST, "after"),
)


class Process:
    """One process's way to a store. `arm` it with a point and what happens there; once dead it does nothing more."""

    def __init__(self, inner: Store, hits: Counter[str] | None = None) -> None:
        self.inner, self.url, self.hits = inner, inner.url, hits
        self.dead = self.stopped = self.paused = False
        self._point: Point | None = None
        self._left = 0
        self._act: Callable[[], None] = self.die

    def arm(self, point: Point, act: Callable[[], None] | None = None) -> None:
        self._point, self._left, self._act = point, point.nth, act or self.die

    def disarm(self) -> None:
        self._point = None

    def die(self) -> None:
        self.dead = True
        raise Died

    def at(self, name: str) -> None:
        """What `collect` calls."""
        self._verb("at", name, lambda: None)

    def put(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        self._verb("put", key, lambda: self.inner.put(key, data))

    def get(self, key: str, start: int = 0, length: int | None = None) -> Any:
        return self._verb("get", key, lambda: self.inner.get(key, start, length))

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        return self._verb("list", prefix, lambda: self.inner.list(prefix, after))

    def tops(self) -> tuple[str, ...]:
        return self._verb("tops", "", self.inner.tops)

    def delete(self, key: str) -> None:
        self._verb("delete", key, lambda: self.inner.delete(key))

    def sweep(self, older_than_s: float) -> int:
        return self._verb("sweep", "", lambda: self.inner.sweep(older_than_s))

    def _verb(self, verb: str, key: str, act: Callable[[], T]) -> T:
        if self.dead:
            raise Died
        point = self._point
        if point is None or point.verb != verb or not re.search(point.pattern, key):
            return act()
        self._left -= 1
        if self._left:
            return act()
        self._point = None
        if self.hits is not None:
            self.hits[point.name] += 1
        self.stopped = True
        if point.when == "before":
            self._stop()
            return act()
        result = act()
        self._stop()
        return result

    def _stop(self) -> None:
        self.paused = True
        try:
            self._act()
        finally:
            self.paused = False
