"""The launcher of the tests: an operator's real `_cuda` function, and the real text of its kernels, on CPU tensors.

How to use it, in tests/kernels/test_<op>.py:

    def test_the_kernels_agree(shim: ShimLauncher) -> None:   # the fixture of conftest: three orders of the threads
        got = op._cuda(*tensors_on_the_cpu)                   # every `launch` in it now goes through g++
        assert torch.equal(got, op.reference(*tensors_on_the_cpu))
        assert shim.launched == ["op_first", "op_second"]     # if it matters which kernels ran

Call `_cuda` itself, not the public function (on a CPU tensor torch would choose `_cpu`). While `shim` is in use,
`torch.empty` is filled with NaN or the largest integer, shared memory with 0xff. A launch raises `ShimError` for a
number of the wrong type, a collective that not every thread reaches, a misaligned vector, an index past an array's end.

A test marked `@pytest.mark.asan` runs once more under AddressSanitizer, in a process of its own (see test_shim.py):
mark one small, oddly sized test for each operator. `shim_of(tmp_path)` takes kernels from another folder than csrc.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everstep.kernels import sources

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(')
CHECKS = "-fsanitize=alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero"
FLAGS = ("-O1", "-g", "-std=c++17", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-w", "-fcf-protection=none")
ASAN = ("-fsanitize=address", "-fsanitize-sections=shared_memory")
UNDER_ASAN = os.environ.get("EVERSTEP_SHIM") == "asan"
LETTERS = {"f4": "f", "f8": "d", "i4": "i", "u4": "u", "i8": "l", "u8": "m"}


class ShimError(Exception):
    """A kernel did, or was given, what a GPU leaves undefined."""


def kernels(text: str) -> list[str]:
    """Return the names of the kernels in a CUDA source."""
    return KERNEL.findall(text)


class ShimLauncher:
    """Has the `launch` of `everstep.kernels.cuda.Launcher`; `launched` are the kernels' names in order."""

    def __init__(self, seed: int = 0, folder: Path = sources.FOLDER) -> None:
        self.seed, self.folder = seed, folder
        self.launched: list[str] = []

    def launch(self, source: str, kernel: str, grid: int, block: int, *arguments: Any) -> None:
        if block % 32 or not 0 < block <= 1024 or not 0 < grid < 1 << 31:
            raise ShimError(f"{kernel}: {grid} blocks of {block} threads; whole warps, at most 1024, are wanted")
        library = build(source, self.folder)
        wanted = _text(library, f"shim_letters_{kernel}")
        given = "".join(map(_letter, arguments))
        if wanted != given:
            raise ShimError(f"{kernel}: its parameters are {wanted!r}, the arguments {given!r} (see `letter`)")
        held = [_value(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        run = getattr(library, f"shim_launch_{kernel}")
        if run(ctypes.c_uint(grid), ctypes.c_uint(block), ctypes.c_uint64(self.seed), addresses):
            raise ShimError(f"{kernel}: {_text(library, 'shim_message')}")
        self.launched.append(kernel)


def build(source: str, folder: Path = sources.FOLDER) -> ctypes.CDLL:
    """Compile `folder/source` with the shim around it, unless that was done before; return it loaded."""
    program = _program(source, folder)
    return _compiled(program, str(folder), tuple(sorted(path.read_text() for path in folder.glob("*.*h"))))


def _program(source: str, folder: Path) -> str:
    text = (folder / source).read_text()
    wrappers = "".join(f"SHIM_KERNEL({name})\n" for name in kernels(text))
    return (
        f'#include "{HEADER}"\n#include "{folder / source}"\n{wrappers}// {hashlib.sha256(text.encode()).hexdigest()}\n'
    )


@functools.cache
def _compiled(program: str, folder: str, headers: tuple[str, ...]) -> ctypes.CDLL:
    flags = [*FLAGS, *(ASAN if UNDER_ASAN else ()), f"-I{folder}"]
    content = "\0".join([program, HEADER.read_text(), *headers, *flags])
    made = (
        Path(tempfile.gettempdir())
        / f"everstep-shim-{os.getuid()}"
        / f"{hashlib.sha256(content.encode()).hexdigest()[:20]}.so"
    )
    if not made.exists():
        made.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as work:
            (Path(work) / "shim.cpp").write_text(program)
            _gcc(work, *flags, CHECKS, "-c", "shim.cpp", "-o", "shim.o")  # the checks' own library is not linked:
            _gcc(work, *flags, "-shared", "-Wl,-Bsymbolic", "shim.o", "-o", "shim.so")  # the header answers them
            (Path(work) / "shim.so").replace(made)
    return ctypes.CDLL(str(made))


def _gcc(work: str, *arguments: str) -> None:
    done = subprocess.run(["g++", *arguments], cwd=work, capture_output=True, text=True)
    if done.returncode:
        raise ShimError(done.stderr)


def _letter(argument: Any) -> str:
    if argument is None or isinstance(argument, torch.Tensor):
        return "p"
    if isinstance(argument, np.generic):
        return LETTERS.get(argument.dtype.str[1:], argument.dtype.str)
    return type(argument).__name__


def _value(argument: Any) -> Any:
    if argument is None:
        return ctypes.c_void_p()
    if isinstance(argument, torch.Tensor):
        assert argument.is_contiguous(), argument.stride()
        return ctypes.c_void_p(argument.data_ptr())
    return np.ctypeslib.as_ctypes_type(argument.dtype)(argument.item())


def _text(library: ctypes.CDLL, name: str) -> str:
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    found: bytes = function()
    return found.decode()
