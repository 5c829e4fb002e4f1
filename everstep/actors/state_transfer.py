"""Giving the whole state to workers that are behind, by the group's own broadcast: one mechanism for every newcomer.

A survivor that is one step behind is treated alike: the state of the one that finished the step carries everything,
the replicated residual included, which a delta alone could not give.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import google_crc32c
import numpy as np
import torch

from everstep.actors.process_group import ProcessGroup
from everstep.core.errors import StateMismatch
from everstep.training.delta import Delta
from everstep.training.state import tensor_bytes

CHUNK = 32 << 20  # bytes sent at once


def give_state(group: ProcessGroup, facts: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> None:
    """Broadcast named tensors, and a few facts about them (`lsn` and others)."""
    blob = b"".join(bytes(tensor_bytes(tensor)) for tensor in tensors.values())
    names = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()]
    head = {**facts, "names": names, "crc": google_crc32c.value(blob)}
    _broadcast_bytes(group, group.world_rank, json.dumps(head).encode())
    _broadcast_bytes(group, group.world_rank, blob)


def take_state(group: ProcessGroup, source: int) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """Receive what world rank `source` gives: facts and tensors.

    Raises:
        StateMismatch: the bytes that arrived are not those that were sent.
    """
    head = json.loads(_broadcast_bytes(group, source, None).tobytes())
    blob = _broadcast_bytes(group, source, None)
    if google_crc32c.value(blob.tobytes()) != head["crc"]:
        raise StateMismatch(f"the state of step {head['lsn']} was damaged on its way from world rank {source}")
    out, at = {}, 0
    for name, kind, shape in head["names"]:
        dtype: torch.dtype = getattr(torch, kind)
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        raw = torch.from_numpy(blob[at : at + count].copy())
        out[name] = raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
        at += count
    return head, out


def delta_crc(delta: Delta | None, lsn: int) -> int:
    """Return a number that two workers share if they took the same step `lsn`."""
    if delta is None:
        return lsn
    crc = google_crc32c.value(delta.values.tobytes())
    return int(crc if delta.indices is None else google_crc32c.extend(crc, delta.indices.tobytes()))


def _broadcast_bytes(group: ProcessGroup, source: int, data: bytes | None) -> np.ndarray:
    """Send `data` (None: receive it), its length first, in chunks; uint8."""
    length = torch.tensor([len(data or b"")], dtype=torch.int64, device=group.device)
    group.broadcast(length, source)
    whole = torch.empty(int(length), dtype=torch.uint8)
    if data is not None:
        whole.copy_(torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)))
    for part in torch.split(whole, CHUNK) if whole.numel() else ():
        moving = part.to(group.device)
        group.broadcast(moving, source)
        if moving is not part:
            part.copy_(moving)
    return whole.numpy()
