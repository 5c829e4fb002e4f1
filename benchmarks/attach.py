"""What library mode costs a loop: the same loop with and without the log, side by side, repeats interleaved.

    python benchmarks/attach.py [repeats]

Each pair of a repeat takes the same steps from the same state; the ratio is that of their times. The checkpoint actor
works on this machine too, as long as records come and until they are durable.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import everstep
from everstep.core import clock


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(128, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))


# by parameters: width, samples a batch, steps a repeat
SIZES = {"0.1 M": (256, 1024, 60), "1.2 M": (1024, 1024, 10)}


class Loop:
    """One loop, bare or with `after` called at the end of each step."""

    def __init__(self, width: int, batch: int) -> None:
        torch.manual_seed(0)
        self.model = mlp(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.x, self.y = torch.randn(batch, 128), torch.randint(10, (batch,))
        self.taken = 0

    def run(self, steps: int, after: Callable[[torch.Tensor, int], Any]) -> float:
        """Return the seconds that a step takes."""
        began = clock.monotonic()
        for _ in range(steps):
            loss = F.cross_entropy(self.model(self.x), self.y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.taken += 1
            after(loss, self.taken)
        return (clock.monotonic() - began) / steps


def measure(name: str, repeats: int, store: str) -> None:
    width, batch, steps = SIZES[name]
    bare, logged = Loop(width, batch), Loop(width, batch)
    log = everstep.attach(logged.model, logged.optimizer, f"attach-{width}", store, digest_every=0)
    inside: list[float] = []

    def after(loss: torch.Tensor, taken: int) -> None:
        began = clock.monotonic()
        log.step(loss, cursor=taken, rng=True)
        inside.append(clock.monotonic() - began)

    pairs = []
    for repeat in range(-1, repeats):  # the first one warms up
        times = [0.0, 0.0]
        for which in (0, 1) if repeat % 2 else (1, 0):
            times[which] = logged.run(steps, after) if which else bare.run(steps, lambda *_: None)
        if repeat >= 0:
            pairs.append(times)
    log.close()
    ratios = sorted(b / a for a, b in pairs)
    print(
        f"{name:>6} parameters: bare {1e3 * statistics.median(a for a, _ in pairs):7.2f} ms a step, "
        f"logged {1e3 * statistics.median(b for _, b in pairs):7.2f} ms, "
        f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} repeats), "
        f"log.step itself {1e3 * statistics.median(inside[steps:]):.2f} ms",
        flush=True,
    )


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    print(f"{os.cpu_count()} cores, {torch.get_num_threads()} torch threads, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        for name in SIZES:
            measure(name, repeats, f"file:{folder}")


if __name__ == "__main__":
    main()
