"""Top-k by magnitude: the k largest elements, exactly k, the lowest index winning among equals.

Error feedback with top-k: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, algorithm 1.
"""

from __future__ import annotations

import numpy as np
import torch

from everstep.compressors.base import COMPRESSORS, Sparse

ROUNDING = 1e-6  # 0.29 * 100 is 28.999999999999996


@COMPRESSORS.register("topk")
class TopK:
    """Keeps the `density` share of elements that are largest in magnitude (at least one).

    Args:
        density: k / n, in (0, 1].
    """

    def __init__(self, density: float) -> None:
        self.density = density

    def __call__(self, accumulated: torch.Tensor) -> Sparse:
        """Return the k largest elements of `accumulated` (fp32, (n,), finite)."""
        k = max(1, int(accumulated.numel() * self.density + ROUNDING))
        magnitude = accumulated.abs()
        if accumulated.device.type == "cpu":  # a partial sort: half the time of torch.topk at a million elements
            array = magnitude.numpy()
            threshold = torch.tensor(np.partition(array, array.size - k)[array.size - k])
        else:
            threshold = torch.topk(magnitude, k, sorted=False).values.min()
        above = torch.nonzero(magnitude > threshold).view(-1)
        equal = torch.nonzero(magnitude == threshold).view(-1)[: k - above.numel()]
        indices = torch.cat([above, equal]).sort().values
        return Sparse(indices, accumulated[indices])
