"""Launching CUDA kernels: the one function that the operators' host code is written against."""

from __future__ import annotations

from typing import Any, Protocol

Argument = Any  # a tensor (its address is passed), or a NumPy scalar of the parameter's own type


class Launcher(Protocol):
    """Starts kernels; the tests have one that runs them on the CPU."""

    def launch(self, source: str, kernel: str, grid: int, block: int, *arguments: Argument) -> None:
        """Start a kernel; arguments as those of `launch` below, and at least one block."""


class Nvrtc:
    """Compiles by NVRTC at first use, launches on torch's current stream."""

    def launch(self, source: str, kernel: str, grid: int, block: int, *arguments: Argument) -> None:
        """Start a kernel."""
        raise NotImplementedError


launcher: Launcher = Nvrtc()


def launch(source: str, kernel: str, grid: int, block: int, *arguments: Argument) -> None:
    """Start a kernel on torch's current stream of the first tensor's device.

    Args:
        source: the name of a file in `csrc`, "topk_ef.cu".
        kernel: a function in it, declared `extern "C" __global__`.
        grid: how many blocks; with 0 nothing is started.
        block: threads in each.
        arguments: in the kernel's order; tensors by address (None = NULL), numbers as NumPy scalars of its type.
    """
    if grid:
        launcher.launch(source, kernel, grid, block, *arguments)
