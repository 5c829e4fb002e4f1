"""Operators of their own: a specification in plain torch, C for the CPU, CUDA for GPUs; one file each."""

from everstep.kernels.merge import merge, merge_dense
from everstep.kernels.pack import pack, packed_size, unpack
from everstep.kernels.quantise import BLOCK, dequantise, quantise
from everstep.kernels.topk_ef import topk_ef

__all__ = [
    "BLOCK",
    "dequantise",
    "merge",
    "merge_dense",
    "pack",
    "packed_size",
    "quantise",
    "topk_ef",
    "unpack",
]
