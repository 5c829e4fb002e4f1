"""Every global generator, set from one number; not in `training`, because building a model needs it too."""

from __future__ import annotations

import random  # noqa: TID251 - user code draws from it, so it is seeded here

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Set the global generators of Python, NumPy (legacy), torch and, once it is initialised, CUDA.

    Cheap enough for every micro-shard and every sample (9 microseconds). CUDA is left alone until something has
    initialised it: queueing a seed for later, as `torch.manual_seed` does, formats a stack trace a call.

    Args:
        seed: 63 bits, as `core.rng.fold` returns them.
    """
    random.seed(seed)
    # torch's CPU generator takes the low 32 bits; NumPy's is the same algorithm and must not repeat its stream.
    np.random.seed((seed >> 31) & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
