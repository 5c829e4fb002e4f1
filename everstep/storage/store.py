"""Four verbs on immutable objects, alike on memory, a folder and (later) S3; everything above speaks only these."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import pyarrow as pa

from everstep.core.errors import ObjectExists, StoreError, StoreRefused
from everstep.core.ids import new_id

Buffer: TypeAlias = bytes | bytearray | memoryview | pa.Buffer
T = TypeVar("T")

KNOWN_FORMS = "file:./runs, file:/absolute/folder, memory: and memory:name"


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing says about one object: `size` in bytes, `modified` in seconds since the epoch."""

    key: str
    size: int
    modified: float


class Store(Protocol):
    """Immutable objects by name. Keys are relative, `/`-separated, without empty or dotted parts."""

    url: str

    def put(self, key: str, data: Buffer) -> None:
        """Create the object `key`, whole or not at all; it is durable when this returns.

        Raises:
            ObjectExists: there is one already; it is left as it is (and is durable).
            StoreFull: no space is left; nothing of this object stays behind.
            StoreError: anything else the store could not do.
        """

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes from `start` (fewer at the end of the object; None = to the end).

        Raises:
            ObjectMissing: there is no such object.
            StoreError: it cannot be read.
        """

    def list(self, prefix: str) -> list[ObjectInfo]:
        """Return every object whose key starts with the string `prefix`, sorted by key."""

    def delete(self, key: str) -> None:
        """Remove the object; no error when there is none."""


def check_key(key: str) -> str:
    """Return `key` if every store can hold it.

    Raises:
        StoreError: an empty part, a part that starts with a dot, or a NUL.
    """
    if any(not part or part.startswith(".") for part in key.split("/")) or "\0" in key:
        raise StoreError(
            f"object name {key!r} cannot be stored: expected parts joined by '/', none empty or starting with '.'",
            hint="choose another name",
        )
    return key


def absolute(url: str) -> str:
    """Return the URL with a relative folder made absolute; other URLs unchanged."""
    scheme, _, rest = url.partition(":")
    if scheme != "file" or not rest:
        return url
    path = os.path.abspath(os.path.expanduser(rest))
    return "file:/" + path.lstrip("/")


def open_store(url: str) -> Store:
    """Open the store that `url` names; nothing is created or checked yet (see `probe`).

    Args:
        url: `file:FOLDER`, or `memory:NAME` for one shared by this process under that name.

    Raises:
        StoreRefused: the form is not known, or belongs to a later version.
    """
    from everstep.storage.folder import FolderStore  # the stores import this module
    from everstep.storage.memory import shared

    scheme, colon, rest = url.partition(":")
    if colon and scheme == "memory":
        return shared(rest)
    if colon and scheme == "file" and rest:
        return FolderStore(absolute(url).removeprefix("file:"))
    if colon and scheme == "s3":
        raise StoreRefused(
            f"store {url!r}: object stores of the s3 kind come with a later version of everstep",
            hint="use a folder that every node sees, as file:/shared/folder",
        )
    raise StoreRefused(f"store {url!r}: expected one of {KNOWN_FORMS}", hint=f"write run.store as one of {KNOWN_FORMS}")


def probe(store: Store) -> None:
    """Prove that the store keeps the promises a run rests on; leaves nothing behind.

    Raises:
        StoreRefused: an object cannot be created, created only once, read, listed or deleted.
    """
    key, data = f"probe-{new_id()}", b"everstep probe"
    _attempt(store, "create an object", lambda: store.put(key, data))
    try:
        _expect(store, "create an object only once", _second_is_refused(store, key))
        _expect(store, "read back what was written", _attempt(store, "read", lambda: store.get(key)) == data)
        listed = _attempt(store, "list", lambda: store.list(key))
        _expect(store, "list what was written", [entry.key for entry in listed] == [key])
    finally:
        _attempt(store, "delete an object", lambda: store.delete(key))
    _expect(store, "forget what was deleted", not _attempt(store, "list", lambda: store.list(key)))


def _second_is_refused(store: Store, key: str) -> bool:
    try:
        _attempt(store, "create an object again", lambda: store.put(key, b"another"))
    except ObjectExists:
        return True
    return False


def _expect(store: Store, what: str, kept: bool) -> None:
    if not kept:
        raise StoreRefused(
            f"store {store.url} does not {what}, so a second writer could damage a run",
            hint="use a local folder or a shared file system with hard links and atomic create",
        )


def _attempt(store: Store, what: str, act: Callable[[], T]) -> T:
    try:
        return act()
    except ObjectExists:
        raise
    except StoreError as error:
        if isinstance(error.__cause__, PermissionError):
            folder = store.url.removeprefix("file:")
            raise StoreRefused(
                f"store {store.url}: user id {os.getuid()} has no permission to {what} in folder {folder} "
                f"({error.message})",
                hint=f"give user id {os.getuid()} read, write and search permission on {folder}, "
                "or set run.store to a folder of your own",
            ) from error
        raise StoreRefused(f"store {store.url} cannot {what}: {error.message}", hint=error.hint) from error
