"""Four verbs on immutable objects, alike on memory, a folder and S3; everything above speaks only these."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

import pyarrow as pa

from everstep.core.errors import ObjectExists, StoreError, StoreRefused
from everstep.core.ids import new_id

Buffer: TypeAlias = bytes | bytearray | memoryview | pa.Buffer
Pace: TypeAlias = Callable[[int], None]
"""Called with a byte count just before that many bytes are written or sent; it may sleep, and raise to stop the put."""
T = TypeVar("T")

MAPPED_FROM = 1 << 20  # bytes
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)

KNOWN_FORMS = "file:./runs, file:/absolute/folder, s3://bucket/prefix, memory: and memory:name"
NEEDED = {
    "file": "use a local folder or a shared file system with hard links and atomic create",
    "s3": "use an object store with conditional writes (If-None-Match on PutObject and on CompleteMultipartUpload), "
    "or a folder that every node sees, as file:/shared/folder",
}


@dataclass(frozen=True)
class ObjectInfo:
    """What a listing says about one object: `size` in bytes, `modified` in seconds since the epoch."""

    key: str
    size: int
    modified: float


class Store(Protocol):
    """Immutable objects by name. Keys are relative, `/`-separated, without empty or dotted parts."""

    url: str

    def put(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        """Create the object `key`, whole or not at all; it is durable when this returns.

        Args:
            key: its name.
            data: its bytes.
            pace: makes the put a steady trickle. What it raises ends the put and leaves nothing (but an exception that
                is no `Exception` may leave what `sweep` removes).

        Raises:
            ObjectExists: there is one already; it is left as it is (and is durable).
            StoreFull: no space is left; nothing of this object stays behind.
            StoreError: anything else the store could not do; if it did not answer, the object may yet appear.
        """

    def get(self, key: str, start: int = 0, length: int | None = None) -> Buffer:
        """Return `length` bytes from `start` (fewer at the end of the object; None = to the end).

        The caller may write into what it is given, if that is writable.

        Raises:
            ObjectMissing: there is no such object.
            StoreError: it cannot be read.
        """

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        """Return every object whose key starts with the string `prefix` and is greater than `after`, sorted by key."""

    def tops(self) -> tuple[str, ...]:
        """Return what stands before the first `/` of the keys, each once, sorted; a name may have no key any more."""

    def delete(self, key: str) -> None:
        """Remove the object; no error when there is none."""

    def sweep(self, older_than_s: float) -> int:
        """Remove what puts that crashed at least so long ago left behind, and return how many; for garbage collection.

        A put that is still at work must be younger than that, else it fails.
        """


@runtime_checkable
class PutsInParts(Protocol):
    """A store that sends large objects in parts, which needs a second kind of conditional write."""

    def put_in_parts(self, key: str, data: Buffer) -> None:
        """Do what `put` does, in parts however small the data."""


def room(size: int) -> bytearray | memoryview:
    """Return writable memory for `size` bytes that are about to be read, belonging to the caller alone.

    Mapped where it is large: neither zeroed first, nor of huge pages, which a fresh process waits long for.
    """
    return bytearray(size) if size < MAPPED_FROM else memoryview(mmap.mmap(-1, size, flags=PRIVATE))


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


def open_store(url: str, *, endpoint: str | None = None, region: str | None = None) -> Store:
    """Open the store that `url` names; nothing is created or checked yet (see `probe`).

    Args:
        url: `file:FOLDER`, `s3://BUCKET/PREFIX`, or `memory:NAME` for one shared by this process under that name.
        endpoint: of the S3 service; None = as AWS_ENDPOINT_URL or the AWS configuration says.
        region: of the bucket; None = as AWS_REGION or the AWS configuration says.

    Raises:
        StoreRefused: the form is not known, or its parts cannot be used.
    """
    from everstep.storage.folder import FolderStore  # the stores import this module
    from everstep.storage.memory import shared

    scheme, colon, rest = url.partition(":")
    if colon and scheme == "memory":
        return shared(rest)
    if colon and scheme == "file" and rest:
        return FolderStore(absolute(url).removeprefix("file:"))
    if colon and scheme == "s3":
        from everstep.storage.s3 import S3Store  # imports boto3, which is slow

        return S3Store(url, endpoint=endpoint, region=region)
    raise StoreRefused(f"store {url!r}: expected one of {KNOWN_FORMS}", hint=f"write run.store as one of {KNOWN_FORMS}")


def probe(store: Store) -> None:
    """Prove that the store keeps the promises a run rests on; leaves nothing behind.

    Raises:
        StoreRefused: an object cannot be created, created only once, read, listed or deleted.
    """
    key = f"probe-{new_id()}"
    _attempt(store, "list", lambda: store.list(key))  # first: where even that fails there is nothing to clean up
    try:
        _try_verbs(store, key)
    except BaseException:
        with contextlib.suppress(StoreError):
            store.delete(key)
        raise
    _attempt(store, "delete an object", lambda: store.delete(key))
    _expect(store, "forget what was deleted", not _attempt(store, "list", lambda: store.list(key)))


def _try_verbs(store: Store, key: str) -> None:
    data = b"everstep probe"
    _attempt(store, "create an object", lambda: store.put(key, data))
    _expect(store, "create an object only once", _refused(store, lambda: store.put(key, b"another")))
    if isinstance(store, PutsInParts):
        in_parts = _refused(store, lambda: store.put_in_parts(key, b"another"))
        _expect(store, "create an object only once when it is sent in parts", in_parts)
    _expect(store, "read back what was written", _attempt(store, "read", lambda: store.get(key)) == data)
    listed = _attempt(store, "list", lambda: store.list(key))
    _expect(store, "list what was written", [entry.key for entry in listed] == [key])


def _refused(store: Store, second: Callable[[], None]) -> bool:
    try:
        _attempt(store, "create an object again", second)
    except ObjectExists:
        return True
    return False


def _expect(store: Store, what: str, kept: bool) -> None:
    if not kept:
        raise StoreRefused(
            f"store {store.url} does not {what}, so a second writer could damage a run",
            hint=NEEDED["s3" if store.url.startswith("s3:") else "file"],
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
