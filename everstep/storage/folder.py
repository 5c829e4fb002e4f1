"""A store in a folder: temporary file, fsync, hard link to the name, unlink, fsync of the folder.

The link is what makes a name appear: at once, whole, and only if nobody has it. A crash at any point leaves either no
name or the whole object, and at most a temporary file in `.tmp`, which no listing shows.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator

from everstep.core import clock
from everstep.core.errors import ObjectExists, ObjectMissing, StoreError, StoreFull
from everstep.core.ids import new_id
from everstep.storage.store import Buffer, ObjectInfo, Pace, check_key, room

TEMPORARY = ".tmp"
PACED_WRITE = 1 << 20
STEPS = ("created", "written", "synced", "linked", "unlinked", "folder_synced")


def _no_trace(step: str, key: str) -> None:
    """The default of `FolderStore.trace`."""


class FolderStore:
    """Objects as files under `root`, which is created by the first put.

    Args:
        root: the folder; made absolute.
        trace: called with each of `STEPS` and the key as a put passes it; tests crash in there. A `BaseException` that
            is no `Exception` counts as a crash: nothing is cleaned up.
    """

    def __init__(self, root: str, *, trace: Callable[[str, str], None] = _no_trace) -> None:
        self.root = os.path.abspath(root)
        self.url = f"file:{self.root}"
        self.trace = trace
        self._durable: set[str] = set()

    def put(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        """Create the object; see `Store.put`."""
        name = self._file(check_key(key))
        temporary = os.path.join(self.root, TEMPORARY, new_id())
        try:
            self._make_folder(os.path.dirname(temporary))
            self._make_folder(os.path.dirname(name))
            created = False
            if not os.path.lexists(name):
                self._write(temporary, key, memoryview(data).cast("B"), pace)
                created = self._link(temporary, name, key)
            if not created:
                _sync(os.path.dirname(name))  # its writer may have died before it did this
                raise ObjectExists(f"{self.url}: object {key} exists already", hint="read it, or use another name")
        except OSError as error:
            raise self._failure("write", key, error) from error

    def get(self, key: str, start: int = 0, length: int | None = None) -> Buffer:
        """Return bytes of the object; see `Store.get`."""
        try:
            with open(self._file(check_key(key)), "rb", buffering=0) as file:
                file.seek(start)
                return _read(file.fileno(), os.fstat(file.fileno()).st_size - start, length)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissing(
                f"{self.url}: there is no object {key}", hint="list the run's objects to see what is"
            ) from error
        except OSError as error:
            raise self._failure("read", key, error) from error

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        """Return the objects under `prefix`; see `Store.list`."""
        *parts, _ = prefix.split("/")
        if any(not part or part.startswith(".") for part in parts):
            return []  # no key looks like that
        folder = "/".join(parts)
        try:
            found = self._walk(folder + "/" if folder else "", prefix, after)
            return sorted(found, key=lambda entry: entry.key)
        except OSError as error:
            raise self._failure("list", prefix, error) from error

    def tops(self) -> tuple[str, ...]:
        """Return the first parts of the keys; see `Store.tops`."""
        try:
            with os.scandir(self.root) as entries:
                found = (entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
                return tuple(sorted(found))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise self._failure("list", "", error) from error

    def delete(self, key: str) -> None:
        """Remove the object; see `Store.delete`."""
        try:
            _remove(self._file(check_key(key)))
        except OSError as error:
            raise self._failure("delete", key, error) from error

    def sweep(self, older_than_s: float) -> int:
        """Remove the temporary files of crashed puts; see `Store.sweep`."""
        swept, limit = 0, clock.wall() - older_than_s
        try:
            with os.scandir(os.path.join(self.root, TEMPORARY)) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # its put has ended since
                        if entry.stat().st_mtime <= limit:
                            os.unlink(entry.path)
                            swept += 1
        except FileNotFoundError:
            pass  # nothing was ever put here
        except OSError as error:
            raise self._failure("sweep", TEMPORARY, error) from error
        return swept

    def _file(self, key: str) -> str:
        return os.path.join(self.root, *key.split("/"))

    def _write(self, temporary: str, key: str, data: memoryview, pace: Pace | None) -> None:
        try:
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                self.trace("created", key)
                size = PACED_WRITE if pace else max(1, len(data))
                for at in range(0, len(data), size):
                    part = data[at : at + size]
                    if pace:
                        pace(len(part))
                    _write_all(handle, part)
                self.trace("written", key)
                os.fsync(handle)
                self.trace("synced", key)
            finally:
                os.close(handle)
        except Exception:
            _remove(temporary)
            raise

    def _link(self, temporary: str, name: str, key: str) -> bool:
        """Give the written file its name; False if somebody else has it."""
        try:
            os.link(temporary, name)
        except FileExistsError:
            _remove(temporary)
            return False
        except OSError as error:
            _remove(temporary)
            if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise StoreError(
                    f"{self.url}: cannot make a hard link for {key} ({error.strerror})",
                    hint="use a file system with hard links (not FAT or exFAT)",
                ) from None
            raise
        try:
            self.trace("linked", key)
            os.unlink(temporary)
            self.trace("unlinked", key)
            _sync(os.path.dirname(name))
            self.trace("folder_synced", key)
        except Exception:  # the name stays: others may have seen it, and a repeated put finds its own bytes there
            _remove(temporary)
            raise
        return True

    def _make_folder(self, path: str) -> None:
        """Create a folder and make its name durable, and those of the folders between it and the root."""
        if path in self._durable and os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        above_root = len(path) <= len(self.root)
        if not os.path.isdir(parent) or not above_root:
            self._make_folder(parent)
        try:
            os.mkdir(path)
            _sync(parent)
        except FileExistsError:
            if not above_root:
                _sync(parent)  # whoever created it may have died before it did this
        self._durable.add(path)

    def _walk(self, folder: str, prefix: str, after: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(os.path.join(self.root, folder)) as entries:
                for entry in entries:
                    key = folder + entry.name
                    if entry.name.startswith(".") or not key.startswith(prefix):
                        continue
                    if entry.is_dir():
                        inside = key + "/"
                        if inside > after or after.startswith(inside):  # else all in there is smaller
                            yield from self._walk(inside, prefix, after)
                    elif key > after:
                        yield from _describe(key, entry)
        except (FileNotFoundError, NotADirectoryError):
            return  # nothing there, or deleted while we looked

    def _failure(self, what: str, key: str, error: OSError) -> StoreError:
        text = f"{self.url}: cannot {what} {key}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFull(text, hint="free some space there, or retain fewer rounds; nothing was half-written")
        return StoreError(text, hint=f"check that the folder {self.root} is there and writable")


def _describe(key: str, entry: os.DirEntry[str]) -> Iterator[ObjectInfo]:
    try:
        facts = entry.stat()
    except FileNotFoundError:
        return
    yield ObjectInfo(key, facts.st_size, facts.st_mtime)


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _read(handle: int, remaining: int, length: int | None) -> Buffer:
    """Read up to `length` bytes; few are given as `bytes`."""
    whole = room(max(0, remaining if length is None else min(length, remaining)))
    view, done = memoryview(whole), 0
    while done < len(view) and (count := os.readv(handle, [view[done:]])):
        done += count
    return view[:done] if isinstance(whole, memoryview) else bytes(view[:done])


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _sync(folder: str) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
