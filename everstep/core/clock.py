"""The only place that reads a clock, so that tests and policies can be given another."""

from __future__ import annotations

import time


def wall() -> float:
    """Seconds since the Unix epoch; comparable between processes of one machine."""
    return time.time()


def monotonic() -> float:
    """Seconds on a clock that never goes back; only differences mean something."""
    return time.perf_counter()


def sleep(seconds: float) -> None:
    """Give the processor away for `seconds`."""
    time.sleep(seconds)


def thread_cpu() -> float:
    """Processor seconds used by the calling thread."""
    return time.thread_time()


def process_cpu() -> float:
    """Processor seconds used by this process, all threads."""
    return time.process_time()


def stamp() -> str:
    """The wall clock as `YYYYmmdd-HHMMSS`, for names."""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(wall()))
