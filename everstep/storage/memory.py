"""A store in the memory of this process: for tests, and for runs that need not outlive it."""

from __future__ import annotations

import threading

from everstep.core import clock
from everstep.core.errors import ObjectExists, ObjectMissing
from everstep.storage.store import Buffer, ObjectInfo, Pace, check_key

_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


class MemoryStore:
    """Objects in a dictionary; every verb is atomic among threads."""

    def __init__(self, name: str = "") -> None:
        self.url = f"memory:{name}"
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        """Create the object; see `Store.put`."""
        if pace is not None:
            pace(memoryview(data).nbytes)
        copy = bytes(memoryview(data))
        with self._lock:
            if check_key(key) in self._objects:
                raise ObjectExists(f"{self.url}: object {key} exists already", hint="read it, or use another name")
            self._objects[key] = (copy, clock.wall())

    def get(self, key: str, start: int = 0, length: int | None = None) -> Buffer:
        """Return bytes of the object; see `Store.get`."""
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise ObjectMissing(f"{self.url}: there is no object {key}", hint="list the run's objects to see what is")
        stop = None if length is None else start + length
        return found[0][start:stop] if start or length is not None else found[0]

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        """Return the objects under `prefix`; see `Store.list`."""
        with self._lock:
            found = [(key, *entry) for key, entry in self._objects.items() if key.startswith(prefix) and key > after]
        return [ObjectInfo(key, len(data), modified) for key, data, modified in sorted(found)]

    def tops(self) -> tuple[str, ...]:
        """Return the first parts of the keys; see `Store.tops`."""
        with self._lock:
            return tuple(sorted({key.partition("/")[0] for key in self._objects if "/" in key}))

    def delete(self, key: str) -> None:
        """Remove the object; see `Store.delete`."""
        with self._lock:
            self._objects.pop(key, None)

    def sweep(self, older_than_s: float) -> int:
        """Do nothing: a put in memory leaves nothing behind; see `Store.sweep`."""
        return 0


def shared(name: str) -> MemoryStore:
    """Return this process's store of that name, the same one each time."""
    with _named_lock:
        if name not in _named:
            _named[name] = MemoryStore(name)
        return _named[name]
