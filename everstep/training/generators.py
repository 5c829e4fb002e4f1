"""The global generators of a process, as JSON: what a loop of one's own draws from."""

from __future__ import annotations

import base64
import random  # noqa: TID251 - user code draws from it, so it is kept
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def captured() -> dict[str, Any]:
    """Return the state of Python's, NumPy's (legacy), torch's and each initialised CUDA device's generator."""
    version, words, gauss = random.getstate()
    kind, keys, at, has_gauss, cached = np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {
        "python": [version, _text(np.array(words, np.uint32)), gauss],
        "numpy": [kind, _text(np.asarray(keys)), int(at), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state().numpy()),
        "cuda": [_text(state.numpy()) for state in devices],
    }


def put_back(states: Mapping[str, Any]) -> None:
    """Set the generators as `captured` found them; devices that are not there are left out."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(_array(words, np.uint32).tolist()), gauss))
    kind, keys, at, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, _array(keys, np.uint32), at, has_gauss, cached))
    torch.set_rng_state(torch.from_numpy(_array(states["torch"], np.uint8)))
    if states["cuda"] and torch.cuda.is_available():
        for index, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(torch.from_numpy(_array(state, np.uint8)), index)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave the generators as they were, whatever is drawn or seeded inside."""
    before = captured()
    try:
        yield
    finally:
        put_back(before)


def _text(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(base64.b64decode(text)), dtype)
