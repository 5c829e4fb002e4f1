"""A put that dies at any step leaves no name or the whole object: the process alone, then the machine with it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from everstep.core.errors import ObjectExists
from everstep.storage import folder
from everstep.storage.folder import STEPS, FolderStore

DATA = bytes(range(256)) * 64
KEY = "run/log/object"


class Crash(BaseException):
    """The machine stops here."""


class Disk:
    """Knows what fsync made durable below a root, and drops the rest."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.files: set[int] = set()
        self.names: set[str] = set()
        monkeypatch.setattr(os, "fsync", self._file)
        monkeypatch.setattr(folder, "_sync", self._folder)

    def _file(self, handle: int) -> None:
        self.files.add(os.fstat(handle).st_ino)

    def _folder(self, path: str) -> None:
        self.names |= {os.path.join(path, name) for name in os.listdir(path)}

    def drop(self) -> None:
        for path in sorted(self.root.rglob("*")):
            if not path.exists():
                continue
            if str(path) not in self.names:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            elif path.is_file() and path.stat().st_ino not in self.files:
                os.truncate(path, 0)


def crash_at(wanted: str) -> folder.Callable[[str, str], None]:
    def trace(step: str, key: str) -> None:
        assert key == KEY
        if step == wanted:
            raise Crash

    return trace


@pytest.mark.parametrize("step", STEPS)
def test_process_dies(tmp_path: Path, step: str) -> None:
    child = os.fork()
    if child == 0:
        try:
            FolderStore(str(tmp_path), trace=lambda at, _: os._exit(7) if at == step else None).put(KEY, DATA)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    store = FolderStore(str(tmp_path))
    found = store.list("")
    if STEPS.index(step) < STEPS.index("linked"):
        assert found == []
        store.put(KEY, DATA)
    else:
        assert [(info.key, info.size) for info in found] == [(KEY, len(DATA))]
    assert store.get(KEY) == DATA
    assert store.sweep(3600) == 0
    assert store.sweep(0) == (STEPS.index(step) < STEPS.index("unlinked"))
    assert os.listdir(tmp_path / ".tmp") == []


def test_a_crash_in_a_paced_put_leaves_only_what_sweep_removes(tmp_path: Path) -> None:
    def pace(count: int) -> None:
        raise Crash

    store = FolderStore(str(tmp_path))
    with pytest.raises(Crash):
        store.put(KEY, DATA, pace=pace)
    assert store.list("") == []
    assert store.sweep(0) == 1


@pytest.mark.parametrize("step", [*STEPS, "none"])
def test_machine_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    root = tmp_path / "store"
    disk = Disk(tmp_path, monkeypatch)
    try:
        FolderStore(str(root), trace=crash_at(step)).put(KEY, DATA)
        assert step == "none"
    except Crash:
        pass
    disk.drop()
    store = FolderStore(str(root))
    found = store.list("")
    if step in ("folder_synced", "none"):
        assert len(found) == 1
    if found:
        assert store.get(KEY) == DATA
    else:
        store.put(KEY, DATA)


@pytest.mark.parametrize("step", ["linked", "unlinked"])
def test_an_object_found_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """One process dies before its fsync of the folder, a second relies on the name, then the power fails."""
    root = tmp_path / "store"
    disk = Disk(tmp_path, monkeypatch)
    with pytest.raises(Crash):
        FolderStore(str(root), trace=crash_at(step)).put(KEY, DATA)
    with pytest.raises(ObjectExists):
        FolderStore(str(root)).put(KEY, DATA)
    disk.drop()
    assert FolderStore(str(root)).get(KEY) == DATA
