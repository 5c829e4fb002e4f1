"""A log that is written while steps come: how even the trickle of bases is, and how far durable lies behind.

The threads are those of a checkpoint actor: segments, bases, backlog.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
from gpt2_log import Log

from everstep.core import clock
from everstep.training.base_writer import Pacer

LOOK_S = 0.01
WINDOW_S = 1.0


class Flow(Pacer):
    """A pacer that notes when it let how many bytes go."""

    def __init__(self, rate: Callable[[], float | None]) -> None:
        super().__init__(rate)
        self.gone: list[tuple[float, int]] = []

    def __call__(self, size: int) -> None:
        super().__call__(size)
        self.gone.append((clock.monotonic(), size))

    def windows(self, began: float, ended: float) -> list[float]:
        """Return bytes a second in each whole window."""
        out = [0.0] * int((ended - began) / WINDOW_S)
        for when, size in self.gone:
            place = int((when - began) / WINDOW_S)
            if 0 <= place < len(out):
                out[place] += size / WINDOW_S
        return out


class Lag:
    """When each step was received and when it was durable."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.received: dict[int, float] = {}
        self.durable: dict[int, float] = {}
        self.steps: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        seen = min(self.log.replica.durable().values())
        while not self._ended.wait(LOOK_S):
            now, reached = clock.monotonic(), min(self.log.replica.durable().values())
            self.durable |= dict.fromkeys(range(seen + 1, reached + 1), now)
            seen = reached
            self.steps.append(max(self.received, default=seen) - seen)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def seconds(self, since: int) -> list[float]:
        return [when - self.received[lsn] for lsn, when in self.durable.items() if lsn in self.received and lsn > since]


@contextlib.contextmanager
def threads(log: Log) -> Iterator[None]:
    ended = threading.Event()
    broken: list[BaseException] = []

    def repeat(work: Callable[[], bool]) -> None:
        try:
            while not ended.is_set():
                if not work():
                    ended.wait(0.05)
        except BaseException as error:
            broken.append(error)

    works = (lambda: log.writer.work(flush=False), log.bases.work, log.replica.merge_backlog)
    running = [threading.Thread(target=repeat, args=(work,), daemon=True) for work in works]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        log.bases.settle()
        ended.set()
        for thread in running:
            thread.join()
        if broken:
            raise broken[0]


def measure(log: Log, case: str, step_s: float, seconds: float, max_lag_s: float) -> dict[str, Any]:
    """Feed a step every `step_s` for a while and return what was seen after the first round.

    Raises:
        RuntimeError: no round was written in that time.
    """
    log.put_bases()
    log.writer.max_lag_s = max_lag_s
    log.bases.pacer = flow = Flow(log.bases.rate)
    lag, process = Lag(log), psutil.Process(os.getpid())
    warm = settled_at = None
    with threads(log):
        began = clock.monotonic()
        while (now := clock.monotonic()) < began + seconds:
            log.take_step()
            lag.received[log.live.lsn] = clock.monotonic()
            if warm is None and len(log.bases.proved) > len(log.replica.states):  # from here on the rate is known
                warm, settled_at, cpu = log.live.lsn, clock.monotonic(), process.cpu_times()
            clock.sleep(max(0.0, now + step_s - clock.monotonic()))
        ended, last = clock.monotonic(), process.cpu_times()
    lag.end()
    if warm is None or settled_at is None:
        raise RuntimeError(
            f"{seconds} s are too short for a round and a base; measure longer, or with a shorter base interval"
        )
    rates = flow.windows(settled_at, ended)
    mean = sum(rates) / len(rates)
    late, behind = sorted(lag.seconds(warm)), sorted(lag.steps)
    return {
        "section": "live", "case": case, "step_seconds": step_s, "steps": log.live.lsn - warm,
        "round_bytes": log.bases.round_bytes, "base_interval": log.bases.base_interval,
        "rounds": len(log.bases.proved) // len(log.replica.states),
        "base_rate_mean": round(mean), "base_rate_max": round(max(rates)), "max_over_mean": round(max(rates) / mean, 2),
        "idle_windows": sum(rate == 0 for rate in rates), "windows": len(rates),
        "lag_steps_p50": at(behind, 0.5), "lag_steps_p99": at(behind, 0.99),
        "lag_s_p50": round(at(late, 0.5), 2), "lag_s_p99": round(at(late, 0.99), 2), "lag_s_max": round(late[-1], 2),
        "max_lag_s": max_lag_s,
        "cpu_share": round((last.user + last.system - cpu.user - cpu.system) / (ended - settled_at), 2),
    }  # fmt: skip


def at(ordered: list[Any], share: float) -> Any:
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
