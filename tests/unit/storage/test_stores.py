"""One conformance suite that every store passes, then what is special to each."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from everstep.core.errors import ObjectExists, ObjectMissing, StoreError, StoreFull, StoreRefused
from everstep.storage.folder import FolderStore
from everstep.storage.memory import MemoryStore
from everstep.storage.store import Store, absolute, open_store, probe


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore("suite") if request.param == "memory" else FolderStore(str(tmp_path / "deep" / "store"))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, pa.py_buffer])
def test_reads_back_what_was_put(store: Store, kind: type) -> None:
    store.put("run/a.bin", kind(b"some bytes"))
    assert store.get("run/a.bin") == b"some bytes"
    assert type(store.get("run/a.bin")) is bytes


def test_ranged_get(store: Store) -> None:
    store.put("a", b"0123456789")
    assert store.get("a", 3) == b"3456789"
    assert store.get("a", 3, 4) == b"3456"
    assert store.get("a", 8, 100) == b"89"
    assert store.get("a", 100) == b""
    assert store.get("a", 0, 0) == b""


def test_an_empty_object_is_an_object(store: Store) -> None:
    store.put("empty", b"")
    assert store.get("empty") == b""
    assert [info.size for info in store.list("")] == [0]


def test_put_creates_only(store: Store) -> None:
    store.put("run/a", b"first")
    with pytest.raises(ObjectExists, match="run/a"):
        store.put("run/a", b"second")
    assert store.get("run/a") == b"first"


def test_missing_object(store: Store) -> None:
    store.put("run/a", b"x")
    for key in ("run/b", "other/a", "run", "run/a/b"):
        with pytest.raises(ObjectMissing, match=key):
            store.get(key)


def test_list_takes_a_plain_string_prefix_and_sorts(store: Store) -> None:
    keys = ["a", "ab/1", "ab/2", "ab/2x/y", "abc", "b/1"]
    for key in reversed(keys):
        store.put(key, key.encode())
    for prefix in ("", "a", "ab", "ab/", "ab/2", "ab/2x/", "abc", "b", "c", "ab/9/", "/", "..", "a//"):
        found = store.list(prefix)
        assert [info.key for info in found] == [key for key in keys if key.startswith(prefix)], prefix
        assert all(info.size == len(info.key) and info.modified > 1e9 for info in found)


def test_delete_twice(store: Store) -> None:
    store.put("run/a", b"x")
    store.delete("run/a")
    store.delete("run/a")
    assert store.list("") == []
    store.put("run/a", b"again")


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".tmp/a", "a/.b", "a\0b"])
def test_names_no_store_can_hold(store: Store, key: str) -> None:
    with pytest.raises(StoreError, match="cannot be stored"):
        store.put(key, b"x")


def test_one_of_many_writers_wins(store: Store) -> None:
    won: list[int] = []
    gate = threading.Barrier(8)

    def write(number: int) -> None:
        gate.wait()
        try:
            store.put("run/same", str(number).encode())
        except ObjectExists:
            return
        won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("run/same") == str(won[0]).encode()


def test_probe_passes_and_leaves_nothing(store: Store) -> None:
    probe(store)
    assert store.list("") == []


def test_probe_refuses_a_store_that_overwrites() -> None:
    class Overwrites(MemoryStore):
        def put(self, key: str, data: object) -> None:
            self.delete(key)
            super().put(key, data)  # type: ignore[arg-type]

    with pytest.raises(StoreRefused, match="only once") as caught:
        probe(Overwrites())
    assert caught.value.hint


def test_probe_says_who_lacks_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(StoreRefused, match=f"user id {os.getuid()} .*{tmp_path.name}") as caught:
        probe(FolderStore(str(tmp_path / "store")))
    assert "permission" in caught.value.hint


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("file:./runs") == f"file:{tmp_path}/runs"
    assert absolute("file:/somewhere/x") == "file:/somewhere/x"
    assert absolute("file:///somewhere/x") == "file:/somewhere/x"
    assert absolute("memory:a") == "memory:a"
    assert open_store("file:./runs").url == f"file:{tmp_path}/runs"
    assert open_store("memory:urls") is open_store("memory:urls")
    assert open_store("memory:urls") is not open_store("memory:")
    with pytest.raises(StoreRefused, match="later version"):
        open_store("s3://bucket/prefix")
    for url in ("runs", "ftp://x", "file:", ""):
        with pytest.raises(StoreRefused, match="memory:name"):
            open_store(url)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync", "link"])
def test_a_full_folder_keeps_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    store = FolderStore(str(tmp_path))
    store.put("run/first", b"x")  # so that the folders are there

    def full(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(StoreFull, match="run/second"):
            store.put("run/second", b"y")
    assert [info.key for info in store.list("")] == ["run/first"]
    assert os.listdir(tmp_path / ".tmp") == []
    store.put("run/second", b"y")


def test_a_folder_that_cannot_be_synced_fails_the_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(str(tmp_path))
    store.put("run/first", b"x")
    calls: list[int] = []

    def second_fails(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 2:
            raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", second_fails)
        with pytest.raises(StoreError, match="I/O error"):
            store.put("run/second", b"y")
    assert [info.key for info in store.list("")] == ["run/first"]
    assert os.listdir(tmp_path / ".tmp") == []


def test_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreRefused, match="hard link"):
        probe(FolderStore(str(tmp_path)))


def test_folder_removed_under_an_open_store(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path / "s"))
    store.put("run/a", b"x")
    (tmp_path / "s" / "run" / "a").unlink()
    (tmp_path / "s" / "run").rmdir()
    store.put("run/a", b"y")
    assert store.get("run/a") == b"y"
