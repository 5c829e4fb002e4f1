"""Gradient compressors: what of an accumulated gradient is sent and logged; the rest is the residual."""

from everstep.compressors.base import (
    COMPRESSORS,
    Codes,
    Compressed,
    Compressor,
    Reducer,
    Spec,
    build_compressor,
    finite,
)
from everstep.compressors.powersgd import PowerSGD
from everstep.compressors.quantised import Int4, Int8
from everstep.compressors.randk import RandK
from everstep.compressors.topk import TopK, TopKInt8

__all__ = [
    "COMPRESSORS", "Codes", "Compressed", "Compressor", "Int4", "Int8", "PowerSGD", "RandK", "Reducer", "Spec",
    "TopK", "TopKInt8", "build_compressor", "finite",
]  # fmt: skip
