"""The C library for the CPU: found beside this file, else made once by `cc`, else absent.

It carries the checksum of the sources it was made from, so that one of another version is never taken.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from everstep.kernels import sources

NOTICE = "everstep: the kernels run in plain torch, several times slower: {}; a C compiler (cc) mends it"


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the C library, or None where there is none and none can be made (said once, on stderr)."""
    if os.environ.get("EVERSTEP_NATIVE") == "0":
        return None
    wanted = sources.checksum()
    made = _cache() / f"kernels-{wanted}.so"
    for path in [*Path(__file__).parent.glob("_native*.so"), made]:
        if found := _load(path, wanted):
            return found
    try:
        make(made)
    except (OSError, subprocess.CalledProcessError) as error:
        why = error.stderr.strip().splitlines()[-1] if isinstance(error, subprocess.CalledProcessError) else error
        print(NOTICE.format(why), file=sys.stderr)
        return None
    return _load(made, wanted)


def make(target: Path) -> None:
    """Compile the C sources to `target`.

    Raises:
        OSError: there is no compiler, or the folder cannot be written.
        subprocess.CalledProcessError: the compiler refused; its words are in `stderr`.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise FileNotFoundError("no C compiler was found")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        define = f'-DEVERSTEP_SOURCES="{sources.checksum()}"'
        command = [compiler, *sources.FLAGS, "-shared", define, *map(str, sources.files()), "-lm", "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.replace(target)  # whole or not at all: several processes may do this at once


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Return where a contiguous tensor begins, as C takes it; NULL for None."""
    if tensor is None:
        return ctypes.c_void_p()
    assert tensor.is_contiguous() and tensor.device.type == "cpu", (tensor.stride(), tensor.device)
    return ctypes.c_void_p(tensor.data_ptr())


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "everstep"


def _load(path: Path, wanted: str) -> ctypes.CDLL | None:
    try:
        found: Any = ctypes.CDLL(str(path))
        carried = found.everstep_sources
    except (OSError, AttributeError):
        return None
    carried.restype = ctypes.c_char_p
    return found if carried().decode() == wanted else None
