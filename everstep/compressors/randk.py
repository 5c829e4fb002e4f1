"""Random-k: one element of each of k equal stretches, drawn by (seed, step), so that places cost nothing to send.

Every element is equally likely. Without error feedback the values are scaled by n / k, which makes the sent gradient
unbiased (Wangni et al., "Gradient Sparsification for Communication-Efficient Distributed Optimization", NeurIPS 2018);
with it they are not, as in Stich, Cordonnier and Jaggi, NeurIPS 2018.
"""

from __future__ import annotations

import numpy as np
import torch

from everstep.compressors.base import COMPRESSORS, Compressed, Compressor, finite
from everstep.core.rng import fold


@COMPRESSORS.register("randk")
class RandK(Compressor):
    """Keeps the `density` share of elements, by lot; all workers draw the same."""

    def compress(self, accumulated: torch.Tensor, lsn: int) -> Compressed:
        """Return this step's elements of `accumulated`."""
        indices = self._drawn(accumulated.numel(), lsn, accumulated.device)
        values = accumulated[indices]
        if not self.spec.feedback:
            values *= accumulated.numel() / max(indices.numel(), 1)
        return Compressed(values, indices, finite=finite(accumulated))

    def read(self, message: torch.Tensor, size: int, lsn: int) -> Compressed:
        """Return what `message` made."""
        return Compressed(message.clone().view(torch.float32), self._drawn(size, lsn, message.device))

    def _drawn(self, size: int, lsn: int, device: torch.device) -> torch.Tensor:
        k = self.spec.kept(size)
        # Raw words of a counter-based generator: NumPy keeps that stream for ever, unlike its distributions.
        words = np.random.Philox(key=fold(self.spec.seed, "randk", lsn)).random_raw(k) >> np.uint64(32)
        borders = np.arange(k + 1, dtype=np.uint64) * np.uint64(size) // np.uint64(max(k, 1))
        drawn = borders[:-1] + ((words * np.diff(borders)) >> np.uint64(32))
        return torch.from_numpy(drawn.astype(np.int32)).to(device)
