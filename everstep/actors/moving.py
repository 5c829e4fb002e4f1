"""Tensors as Ray moves them without copies: NumPy bytes with a dtype and a shape beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return copies of tensors as (dtype name, shape, bytes as a uint8 array), by name."""
    return {name: _to_array(tensor) for name, tensor in tensors.items()}


def from_arrays(arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of `to_arrays`, in memory of their own."""
    return {name: _from_array(*value) for name, value in arrays.items()}


def _to_array(tensor: torch.Tensor) -> tuple[str, list[int], Any]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().copy() if flat.numel() else np.empty(0, np.uint8)
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw


def _from_array(kind: str, shape: list[int], raw: Any) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, kind)
    flat = torch.from_numpy(np.array(raw, copy=True)).view(dtype) if len(raw) else torch.empty(0, dtype=dtype)
    return flat.view(shape)
