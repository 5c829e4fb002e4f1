"""Randomness of a step: a function of (seed, step, micro-shard), so it depends on nobody and is never saved."""

from __future__ import annotations

from everstep.core.rng import fold
from everstep.tasks.seeding import seed_all

__all__ = ["seed_all", "step_seed"]


def step_seed(seed: int, lsn: int, micro_shard: int) -> int:
    """Return the seed under which `micro_shard` of step `lsn` runs forward and backward, whoever computes it."""
    return fold(seed, "step", lsn, micro_shard)
