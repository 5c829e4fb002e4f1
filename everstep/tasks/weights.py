"""Starting weights from a file: loaded without executing anything in it, and compared with the model name by name."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from everstep.core.errors import TaskError

SHOWN = 5
"""How many names of each sort a message lists."""


def load_weights(model: nn.Module, path: str) -> None:
    """Copy the weights in `path` into `model`; every name and shape has to fit.

    Args:
        model: parameters and buffers are overwritten in place, keeping their dtype and device.
        path: a `.safetensors` file, or a torch file with a state_dict or `{"model": state_dict}`.

    Raises:
        TaskError: no such file, not a file of weights, or names or shapes that do not fit.
    """
    weights = _read(path)
    own = model.state_dict()
    wrong = _differences(own, weights)
    if wrong:
        raise TaskError(
            f"init_from {path!r} does not fit the model: {'; '.join(wrong)}",
            hint="use the file of this very model, or change the task's settings to the ones it was made with",
        )
    model.load_state_dict(weights, strict=False)  # strict would refuse a tied weight stored under one of its names only


def _read(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise TaskError(f"init_from: no file {path!r}", hint="give a path that every node can read")
    try:
        if path.endswith(".safetensors"):
            content: object = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise TaskError(
            f"init_from: cannot read {path!r} as weights ({error})",
            hint="save a plain state_dict, with safetensors or torch.save; other objects are not unpickled",
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get("model"), Mapping):
        content = content["model"]
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise TaskError(
            f"init_from: {path!r} holds a {type(content).__name__}, not a state_dict",
            hint="write it with torch.save(model.state_dict(), path)",
        )
    return dict(content)


def _differences(own: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    present = {_place(own[key]) for key in own if key in given}
    missing = [key for key in own if key not in given and _place(own[key]) not in present]
    unexpected = [key for key in given if key not in own]
    shapes = [
        f"{key} (expected {_shape(own[key])}, got {_shape(given[key])})"
        for key in own
        if key in given and _shape(own[key]) != _shape(given[key])
    ]
    found = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    return [f"{len(keys)} {what}: {_first(keys)}" for what, keys in found.items() if keys]


def _place(value: object) -> object:
    """What two names of one tied tensor have in common; unlike for anything else."""
    if isinstance(value, Tensor) and value.numel():
        return value.data_ptr(), value.shape, value.stride()
    return id(value)


def _shape(value: object) -> list[int] | str:
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _first(keys: list[str]) -> str:
    more = f", and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(keys[:SHOWN]) + more
