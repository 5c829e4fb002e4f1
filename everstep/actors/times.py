"""What a worker measures of its own steps."""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

KEPT = 10_000  # steps whose times are kept


def _kept() -> deque[float]:
    return deque(maxlen=KEPT)


@dataclass
class Times:
    """Seconds of each step, and what it waited for the log and for its peers; when it ended; processor seconds."""

    steps: deque[float] = field(default_factory=_kept)
    stalls: deque[float] = field(default_factory=_kept)
    exchanges: deque[float] = field(default_factory=_kept)
    ends: deque[float] = field(default_factory=_kept)
    cpu: float = 0.0

    def add(self, seconds: float, stalled: float, exchange: float, end: float) -> None:
        """Count a finished step."""
        self.steps.append(seconds)
        self.stalls.append(stalled)
        self.exchanges.append(exchange)
        self.ends.append(end)

    def recent(self) -> float | None:
        """Return the median step of the last twenty."""
        last = list(self.steps)[-20:]
        return statistics.median(last) if last else None

    def recent_stall(self) -> float | None:
        """Return what a step waited for the log, on average over the last hundred."""
        last = list(self.stalls)[-100:]
        return statistics.fmean(last) if last else None

    def step_after(self, wall: float) -> float | None:
        """Return when the first step was finished after `wall`, or None if none was yet."""
        ends = list(self.ends)
        place = bisect.bisect_left(ends, wall)
        return ends[place] if place < len(ends) else None

    def measures(self) -> dict[str, Any]:
        """Return medians of a step and of its exchange, and the share of step time spent waiting for the log."""
        whole = sum(self.steps)
        return {
            "step_seconds_median": statistics.median(self.steps) if self.steps else None,
            "exchange_seconds_median": statistics.median(self.exchanges) if self.exchanges else None,
            "stall_fraction": sum(self.stalls) / whole if whole else 0.0,
            "train_cpu": self.cpu,
        }
