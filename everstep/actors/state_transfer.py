"""Giving the whole state to a worker that is behind, by the group's own send: one mechanism for every newcomer.

A survivor that is one step behind is treated alike: the state of the one that finished the step carries everything,
the replicated residual included, which a delta alone could not give.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import google_crc32c
import numpy as np
import torch

from everstep.actors.process_group import ProcessGroup
from everstep.core.errors import StateMismatch
from everstep.training.state import tensor_bytes

CHUNK = 32 << 20  # bytes sent at once


def send_state(group: ProcessGroup, to: int, lsn: int, check: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Send named tensors, and the lsn they belong to, to one worker."""
    blob = b"".join(bytes(tensor_bytes(tensor)) for tensor in tensors.values())
    names = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]
    head = {"lsn": lsn, "check": check, "names": names, "bytes": len(blob), "crc": google_crc32c.value(blob)}
    _send_bytes(group, to, json.dumps(head).encode())
    _send_bytes(group, to, blob)


def receive_state(group: ProcessGroup, source: int) -> tuple[int, int, dict[str, torch.Tensor]]:
    """Receive what `send_state` sent: lsn, check value and tensors.

    Raises:
        StateMismatch: the bytes that arrived are not those that were sent.
    """
    head = json.loads(bytes(_receive_bytes(group, source)))
    blob = _receive_bytes(group, source)
    if google_crc32c.value(bytes(blob)) != head["crc"]:
        raise StateMismatch(f"the state of step {head['lsn']} was damaged on its way from world rank {source}")
    out, at = {}, 0
    for name, kind, shape in head["names"]:
        dtype: torch.dtype = getattr(torch, kind)
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        raw = torch.from_numpy(blob[at : at + count].copy())
        out[name] = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
        at += count
    return head["lsn"], head["check"], out


def _send_bytes(group: ProcessGroup, to: int, data: bytes) -> None:
    group.send(torch.tensor([len(data)], dtype=torch.int64, device=group.device), to)
    whole = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
    for part in _chunks(whole):
        group.send(part.to(group.device), to)


def _receive_bytes(group: ProcessGroup, source: int) -> np.ndarray:  # type: ignore[type-arg]  # uint8, (bytes,)
    length = torch.zeros(1, dtype=torch.int64, device=group.device)
    group.receive(length, source)
    whole = torch.empty(int(length), dtype=torch.uint8)
    for part in _chunks(whole):
        arriving = part if group.device.type == "cpu" else torch.empty_like(part, device=group.device)
        group.receive(arriving, source)
        if arriving is not part:
            part.copy_(arriving)
    return whole.numpy()


def _chunks(whole: torch.Tensor) -> Sequence[torch.Tensor]:
    return whole.split(CHUNK) if whole.numel() else ()
