"""The C library: made whole, found, refused where it is of other sources, done without where there is no compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from everstep.kernels import native, sources

ROOT = Path(native.__file__).parents[2]
PROGRAM = """
import torch
torch.set_num_threads(1)
from everstep import kernels
from everstep.kernels import native
print(native.library())
print(kernels.topk_ef(torch.tensor([1.0, -3.0, 2.0]), None, 2)[0].tolist())
print(kernels.unpack(kernels.pack(torch.tensor([1, 2], dtype=torch.int32), 3), 2).tolist())
print(kernels.dequantise(*kernels.quantise(torch.tensor([127.0, -3.0])), 2).tolist())
print(kernels.merge(torch.tensor([[0, 2]], dtype=torch.int32), torch.ones(1, 2), 3)[0].tolist())
print(kernels.merge_dense(torch.tensor([[0, 2]], dtype=torch.int32), torch.ones(1, 2), 3).tolist())
"""
RESULTS = ["[1, 2]", "[1, 2]", "[127.0, -3.0]", "[0, 2]", "[1.0, 0.0, 1.0]"]


def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run PROGRAM from a copy of the sources that has no library beside it."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        cwd=environment["PYTHONPATH"],
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.fixture
def copy(tmp_path: Path) -> dict[str, str]:
    ignored = shutil.ignore_patterns("_native*.so", "__pycache__")
    shutil.copytree(ROOT / "everstep", tmp_path / "copy" / "everstep", ignore=ignored)
    return {"PYTHONPATH": str(tmp_path / "copy"), "XDG_CACHE_HOME": str(tmp_path / "cache")}


def carried(path: Path) -> str:
    function = ctypes.CDLL(str(path)).everstep_sources
    function.restype = ctypes.c_char_p
    found: bytes = function()
    return found.decode()


def test_this_machine_has_the_library() -> None:
    assert native.library() is not None  # else the tests of the operators compare plain torch with itself


def test_a_made_library_carries_the_checksum_of_its_sources(tmp_path: Path) -> None:
    native.make(tmp_path / "new" / "made.so")
    assert carried(tmp_path / "new" / "made.so") == sources.checksum()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["made.so"]


def test_a_library_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "made.so"
    with monkeypatch.context() as patch:
        patch.setattr(sources, "checksum", lambda: "0badc0de")
        native.make(made)
    assert native._load(made, "0badc0de") is not None
    assert native._load(made, sources.checksum()) is None
    assert native._load(tmp_path / "none.so", sources.checksum()) is None
    (tmp_path / "text.so").write_text("no library")
    assert native._load(tmp_path / "text.so", sources.checksum()) is None


def test_the_checksum_tells_every_source_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(sources.FOLDER, tmp_path / "csrc")
    monkeypatch.setattr(sources, "FOLDER", tmp_path / "csrc")
    seen = {sources.checksum()}
    paths = [*(tmp_path / "csrc").glob("*.[ch]")]
    for path in paths:
        path.write_text(path.read_text() + "\n")
        seen.add(sources.checksum())
    assert len(seen) == len(paths) + 1 > 6


def test_without_a_library_beside_it_one_is_made_in_the_cache(copy: dict[str, str]) -> None:
    for _ in range(2):
        done = run(copy)
        made = Path(copy["XDG_CACHE_HOME"]) / "everstep" / f"kernels-{sources.checksum()}.so"
        assert made.name in done.stdout and done.stdout.splitlines()[1:] == RESULTS and not done.stderr
    assert [*made.parent.iterdir()] == [made]


def test_without_a_compiler_plain_torch_is_used_and_said_once(copy: dict[str, str]) -> None:
    done = run({**copy, "PATH": "/nowhere"})
    assert done.stdout.splitlines() == ["None", *RESULTS]
    assert done.stderr == native.NOTICE.format("no C compiler was found") + "\n"


def test_a_compiler_that_fails_is_quoted_once(copy: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "fails").write_text("#!/bin/sh\necho 'no space left' >&2; exit 1\n")
    (tmp_path / "fails").chmod(0o755)
    done = run({**copy, "CC": str(tmp_path / "fails")})
    assert done.stdout.splitlines() == ["None", *RESULTS]
    assert done.stderr == native.NOTICE.format("no space left") + "\n"


def test_it_can_be_switched_off(copy: dict[str, str]) -> None:
    done = run({**copy, "EVERSTEP_NATIVE": "0"})
    assert done.stdout.splitlines() == ["None", *RESULTS] and not done.stderr


def test_a_wheel_brings_the_library_and_the_sources(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "everstep", tmp_path / "everstep", ignore=shutil.ignore_patterns("_native*.so"))
    subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "out")
        names = set(archive.namelist())
    (library,) = (tmp_path / "out" / "everstep" / "kernels").glob("_native*.so")
    assert carried(library) == sources.checksum()
    assert {f"everstep/kernels/csrc/{path.name}" for path in sources.FOLDER.iterdir()} <= names
