"""Memory, folder and a faulty store without faults keep the contract; then what is special to each."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest

from everstep.core.errors import ObjectExists, StoreError, StoreFull, StoreRefused
from everstep.storage.folder import PACED_WRITE, FolderStore
from everstep.storage.memory import MemoryStore
from everstep.storage.store import Store, absolute, open_store, probe
from tests.faulty import Fault, FaultyStore
from tests.store_contract import StoreContract


@pytest.fixture(params=["memory", "folder", "faulty"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return FolderStore(str(tmp_path / "deep" / "store"))
    memory = MemoryStore("suite")
    return memory if request.param == "memory" else FaultyStore(memory)


class TestContract(StoreContract):
    pass


def test_probe_refuses_a_store_that_overwrites() -> None:
    class Overwrites(MemoryStore):
        def put(self, key: str, data: object, **rest: object) -> None:
            self.delete(key)
            super().put(key, data)  # type: ignore[arg-type]

    store = Overwrites()
    with pytest.raises(StoreRefused, match="only once") as caught:
        probe(store)
    assert "hard links" in caught.value.hint
    assert store.list("") == []


@pytest.mark.parametrize("verb", ["put", "get", "list", "delete"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_probe_that_fails_leaves_nothing(verb: str, at: int) -> None:
    kind = "lose_answer" if verb in ("put", "delete") else "fail_before"
    store = FaultyStore(MemoryStore(), [Fault(verb, kind, at=at)])  # type: ignore[arg-type]
    with contextlib.suppress(StoreRefused):
        probe(store)
        assert not store.fired
    assert store.inner.list("") == []


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
    assert [info.key for info in store.list("")] == ["run/first", "run/second"]
    assert os.listdir(tmp_path / ".tmp") == []
    with pytest.raises(ObjectExists):  # after making the name durable, which is what a repeated put is for
        store.put("run/second", b"y")


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


def test_a_folder_is_swept_of_old_temporary_files_only(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    store.put("run/a", b"x")
    for name, age_s in (("old", 1000), ("new", 10)):
        (tmp_path / ".tmp" / name).write_bytes(b"litter")
        at = (tmp_path / ".tmp" / name).stat().st_mtime - age_s
        os.utime(tmp_path / ".tmp" / name, (at, at))
    assert store.sweep(100) == 1
    assert os.listdir(tmp_path / ".tmp") == ["new"]
    assert store.get("run/a") == b"x"


def test_a_folder_is_written_in_paced_pieces(tmp_path: Path) -> None:
    asked: list[int] = []
    FolderStore(str(tmp_path)).put("a", bytes(2 * PACED_WRITE + 5), pace=asked.append)
    assert asked == [PACED_WRITE, PACED_WRITE, 5]


def test_a_paced_put_that_is_stopped_in_the_middle(tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path))
    left = [PACED_WRITE]

    def pace(count: int) -> None:
        if not left:
            raise RuntimeError("stop")
        left.pop()

    with pytest.raises(RuntimeError, match="stop"):
        store.put("run/a", bytes(2 * PACED_WRITE), pace=pace)
    assert store.list("") == []
    assert os.listdir(tmp_path / ".tmp") == []


def test_faults_happen_when_the_script_says() -> None:
    script = [
        Fault("put", "fail_before", match="a"),
        Fault("put", "lose_answer", match="b", at=2),
        Fault("put", "burst", match="c", count=2),
        Fault("get", "truncate", at=2, arg=3),
        Fault("get", "flip", at=3, arg=9),
        Fault("get", "delay", at=4, arg=0.01),
        Fault("list", "hide", match="/b", at=2),
    ]
    store = FaultyStore(MemoryStore(), script)
    store.put("run/b", b"012345")
    for key, present in (("run/a", False), ("run/b2", True), ("run/c", False), ("run/c", False)):
        with pytest.raises(StoreError, match=key):
            store.put(key, b"x")
        assert (key in [info.key for info in store.inner.list("")]) == present
    store.put("run/c", b"x")
    assert [bytes(store.get("run/b")) for _ in range(5)] == [b"012345", b"012", b"032345", b"012345", b"012345"]
    assert [len(store.list("run/")) for _ in range(3)] == [3, 1, 3]
    assert [fault for fault, _ in store.fired] == [script[0], script[1], script[2], script[2], *script[3:]]
