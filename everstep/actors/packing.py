"""A user's folder as one archive that Ray ships to every node: what git ignores stays behind, and so do stores.

The archive depends on nothing but names and contents, so that submitting the same folder again uploads nothing.
"""

from __future__ import annotations

import os
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray._private.thirdparty.pathspec as pathspec  # the one that Ray reads .gitignore with

from everstep.core.errors import UserError

LIMIT = 100 << 20  # bytes: Ray's dashboard takes no larger request (client_max_size)
LEFT_BEHIND = (
    ".git", ".hg", ".venv", "venv", "env", "node_modules", "__pycache__", "*.pyc", ".*_cache", ".cache", ".tox", ".nox",
    ".hypothesis", ".ipynb_checkpoints", "*.egg-info", "everstep-runs",
)  # fmt: skip
IGNORE_FILES = (".gitignore", ".rayignore")
PathSpec: Any = pathspec.PathSpec  # type: ignore[attr-defined]  # it has no annotations
MANIFESTS = "*/manifest/" + "[0-9]" * 20 + ".json"


def pack(folder: Path, archive: Path, needed: str) -> int:
    """Write the folder's files to `archive` and return how many there are.

    Args:
        folder: the user's.
        archive: a `.zip` file to write.
        needed: a file in it that must not be left behind, relative to it.

    Raises:
        UserError: it is too large for Ray, or `needed` would be left behind.
    """
    files = sorted(files_in(folder))
    sizes: Counter[str] = Counter()
    for path in files:
        sizes[path.relative_to(folder).parts[0]] += path.stat().st_size
    if sizes.total() > LIMIT:
        largest = ", ".join(f"{name} ({size / 1e6:,.0f} MB)" for name, size in sizes.most_common(3))
        raise UserError(
            f"{folder} holds {sizes.total() / 1e6:,.0f} MB in {len(files):,} files; Ray ships at most "
            f"{LIMIT / 1e6:,.0f} MB. Largest: {largest}",
            hint="name what the job does not need in .gitignore or .rayignore, or submit from a smaller folder; "
            "data belongs into an object store or a folder that every node sees",
        )
    if folder / needed not in files:
        raise UserError(
            f"{needed} would not be shipped: .gitignore, .rayignore or a default leaves it behind",
            hint="move the job file to a folder that is not ignored",
        )
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as out:
        for path in files:
            entry = zipfile.ZipInfo(path.relative_to(folder).as_posix())  # of 1980, whenever it is made
            entry.external_attr = (stat.S_IFREG | (path.stat().st_mode & 0o777)) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(entry, path.read_bytes())
    return len(files)


def files_in(folder: Path) -> Iterator[Path]:
    """Yield the files that are shipped. Links to files are followed, links to folders are not."""
    yield from _files(folder, [(folder, PathSpec.from_lines("gitwildmatch", LEFT_BEHIND))])


def _files(folder: Path, ignored: list[tuple[Path, Any]]) -> Iterator[Path]:
    ignored = [*ignored, *((folder, spec) for name in IGNORE_FILES if (spec := _ignore_file(folder / name)))]
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path, is_folder = Path(entry.path), entry.is_dir(follow_symlinks=False)
        if any(spec.match_file(f"{path.relative_to(base)}{'/' * is_folder}") for base, spec in ignored):
            continue
        if is_folder:
            if not _left_behind(path):
                yield from _files(path, ignored)
        elif entry.is_file():
            yield path


def _left_behind(folder: Path) -> bool:
    """Return whether a folder is a virtual environment or a store of runs, whatever its name."""
    return (folder / "pyvenv.cfg").exists() or any(folder.glob(MANIFESTS))


def _ignore_file(path: Path) -> Any:
    """Return the patterns in an ignore file, or None."""
    try:
        return PathSpec.from_lines("gitwildmatch", path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return None
