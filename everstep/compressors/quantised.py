"""Block quantisation: every element, as a small integer times its block's scale.

int8: blocks of 256, 1.02 bytes an element; int4: blocks of 64, 0.56. The nearest integer is taken, so it is biased
without error feedback (Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014, for the feedback).
"""

from __future__ import annotations

import torch

from everstep import kernels
from everstep.compressors.base import COMPRESSORS, Codes, Compressed, Compressor, finite


class Quantised(Compressor):
    """Sends all elements with `bits` bits each."""

    bits: int

    def compress(self, accumulated: torch.Tensor, lsn: int) -> Compressed:
        """Return `accumulated` as its receivers will read it."""
        codes = coded(accumulated, self.bits)
        return Compressed(codes.values(accumulated.numel()), codes=codes, finite=finite(codes.scales))

    def read(self, message: torch.Tensor, size: int, lsn: int) -> Compressed:
        """Return what `message` made."""
        codes = read_codes(message, size, self.bits)
        return Compressed(codes.values(size), codes=codes)


@COMPRESSORS.register("int8")
class Int8(Quantised):
    """8 bits an element, a scale for 256 of them."""

    bits = 8


@COMPRESSORS.register("int4")
class Int4(Quantised):
    """4 bits an element, a scale for 64 of them."""

    bits = 4


def coded(values: torch.Tensor, bits: int) -> Codes:
    """Return `values` (fp32, (n,)) quantised; a block that holds one that is not finite has the scale NaN."""
    codes, scales = kernels.quantise(values, bits)
    return Codes(codes, scales, bits)


def read_codes(message: torch.Tensor, size: int, bits: int) -> Codes:
    """Return the codes of `size` values in a message: scales, then codes."""
    cut = 4 * -(-size // kernels.BLOCK[bits])
    codes = message[cut:].contiguous()
    return Codes(codes.view(torch.int8) if bits == 8 else codes, message[:cut].clone().view(torch.float32), bits)
