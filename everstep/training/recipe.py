"""What a process needs to know to build and take steps: plain values, safe to send anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.compressors import Spec


@dataclass(frozen=True)
class Recipe:
    """The part of the job file that decides the bits of the run.

    Two processes with equal recipes and equal state take equal steps. Sizes count samples; `clip_norm` is the
    largest L2 norm of the whole delta, None for no clipping; `shards` counts parameter shards, the step's own
    shard 0 not included; `skips` names batches that are left out, as (step, batches after it); `determinism` is "step"
    (the same bits while the world size stays) or "bitwise" (at any world size); `overlap` reduces a dense gradient
    while backward still runs.
    """

    task: str
    task_options: Mapping[str, Any] = field(default_factory=dict)
    init_from: str | None = None
    seed: int = 0
    global_size: int = 16
    micro_shards: int = 4
    loader_workers: int = 0
    optimizer: str = "adamw"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    scheduler: str | None = None
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None
    autocast: str | None = None
    compressor: str = "none"
    density: float = 0.01
    rank: int = 2
    residual: str = "replicated"
    overlap: bool = True
    shards: int = 2
    on_nonfinite: str = "stop"
    digest_every: int = 50
    skips: tuple[tuple[int, int], ...] = ()
    determinism: str = "step"

    @property
    def compressor_spec(self) -> Spec:
        """What the compressor is built from, but for the parameters' shapes."""
        return Spec(self.density, self.seed, self.residual != "none", self.rank)

    @property
    def keeps_residual(self) -> bool:
        """Whether a step leaves something behind that the log cannot rebuild."""
        return self.compressor != "none" and self.residual != "none"
