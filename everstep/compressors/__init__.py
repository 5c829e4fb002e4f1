"""Gradient compressors: what of an accumulated gradient is sent and logged; the rest is the residual."""

from everstep.compressors.base import COMPRESSORS, Compressor, Sparse, build_compressor
from everstep.compressors.topk import TopK

__all__ = ["COMPRESSORS", "Compressor", "Sparse", "TopK", "build_compressor"]
