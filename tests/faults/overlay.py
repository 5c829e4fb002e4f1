"""A store with some objects changed, over another that stays as it is."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.core.errors import ObjectExists, ObjectMissing
from everstep.storage.store import Buffer, ObjectInfo, Pace, Store


class Overlay:
    """Reads the inner store but for `changes` (None: removed); what is put or deleted stays in here."""

    def __init__(self, inner: Store, changes: Mapping[str, bytes | None]) -> None:
        self.inner, self.url = inner, inner.url
        self.changes = dict(changes)

    def put(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        if self.list(key):
            raise ObjectExists(f"{self.url}: object {key} exists already")
        self.changes[key] = bytes(memoryview(data))

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes | bytearray:
        if key not in self.changes:
            return self.inner.get(key, start, length)
        data = self.changes[key]
        if data is None:
            raise ObjectMissing(f"{self.url}: there is no object {key}")
        return data[start : None if length is None else start + length]

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        found = {info.key: info for info in self.inner.list(prefix, after) if info.key not in self.changes}
        for key, data in self.changes.items():
            if data is not None and key.startswith(prefix) and key > after:
                found[key] = ObjectInfo(key, len(data), 0.0)
        return [found[key] for key in sorted(found)]

    def tops(self) -> tuple[str, ...]:
        return tuple(sorted({info.key.partition("/")[0] for info in self.list("")}))

    def delete(self, key: str) -> None:
        self.changes[key] = None

    def sweep(self, older_than_s: float) -> int:
        return 0
