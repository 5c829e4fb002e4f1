"""Whether compression pays on this link: both ways of exchanging a gradient, measured on the group that will do it.

A step takes either one all-reduce of the whole gradient, or: choose, pack, one all-gather of the messages, read and
merge. What the link, the processors and the number of workers make of it is measured, not modelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from everstep import kernels
from everstep.compressors import Compressor
from everstep.core import clock
from everstep.core.rng import fold
from everstep.training.group import Group

REPEATS = 3
MARGIN = 0.9  # compressed has to be so much quicker: it loses something too


@dataclass(frozen=True)
class Worth:
    """What the slowest worker measured, in seconds a step; the same on all of them."""

    dense_s: float
    compressed_s: float

    @property
    def pays(self) -> bool:
        """Whether to compress."""
        return self.compressed_s < MARGIN * self.dense_s

    def __str__(self) -> str:
        what = "compression is on" if self.pays else "compression is off"
        return f"{what}: an exchange takes {self.compressed_s:.4f} s with it, {self.dense_s:.4f} s without"


def measure(compressor: Compressor, size: int, group: Group, device: torch.device) -> Worth:
    """Exchange a made-up gradient of `size` elements both ways; all workers of the group call this together.

    Raises:
        Interruption: the group broke.
    """
    generator = torch.Generator().manual_seed(fold(0, "worth", group.world_rank))
    gradient = torch.randn(size, generator=generator).to(device)
    out, wire = torch.empty_like(gradient), gradient.clone()

    def compressed() -> None:
        sent = compressor.feed_back(torch.zeros_like(gradient), gradient, 1, out)
        parts = [compressor.read(part, size, 1) for part in group.all_gather(compressor.message(sent, size))]
        indices = [part.indices for part in parts if part.indices is not None]
        if indices:
            kernels.merge(torch.stack(indices), torch.stack([part.values for part in parts]), size)

    mine = torch.tensor([_seconds(lambda: group.all_reduce(wire), device), _seconds(compressed, device)], device=device)
    slowest = torch.stack(group.all_gather(mine)).max(0).values
    return Worth(*slowest.tolist())


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Return the shortest of a few times; the first call, which warms things up, does not count."""
    times = []
    for _ in range(REPEATS + 1):
        began = clock.monotonic()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock.monotonic() - began)
    return min(times[1:])
