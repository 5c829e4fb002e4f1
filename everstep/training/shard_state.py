"""One shard's state in a replica, and how it is written as a base and read back."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch

from everstep.core.errors import StateMismatch
from everstep.training.delta import gradient_views, write_gradient
from everstep.training.layout import Slot
from everstep.training.record import lsn_of, read_buffers, read_delta
from everstep.training.state import TrainState, tensor_bytes

BASE_SCHEMA = pa.schema(
    [("name", pa.utf8()), ("dtype", pa.utf8()), ("shape", pa.list_(pa.int64())), ("data", pa.large_binary())]
)


class ShardState:
    """A shard's merged state: parameters and optimizer of a parameter shard, or the buffers of shard 0.

    Args:
        shard: its number.
        slots: its parameters, in layout order; none for shard 0.
        state: parameters, optimizer and fixed tensors of this shard alone.
        verify: check each logged digest against the state (off when replay is only promised to be close).
    """

    def __init__(self, shard: int, slots: Sequence[Slot], state: TrainState, *, verify: bool = True) -> None:
        self.shard = shard
        self.slots = slots
        self.state = state
        self.verify = verify
        self._flat = torch.empty(slots[-1].stop - slots[0].start if slots else 0)

    @property
    def lsn(self) -> int:
        """The last merged step."""
        return self.state.lsn

    def merge(self, batch: pa.RecordBatch) -> None:
        """Apply the next record.

        Raises:
            StateMismatch: the record is not the next, or the state it leads to is not the one that was logged.
        """
        lsn = lsn_of(batch)
        if self.shard == 0:
            self.state.expect_next(lsn)
            self.state.set_fixed(read_buffers(batch, self.state.fixed))
            self.state.lsn = lsn
        else:
            self._merge_delta(lsn, batch)
        logged = batch.column("digest")[0].as_py()
        if self.verify and logged is not None and logged != self.state.digest():
            raise StateMismatch(
                f"shard {self.shard}: step {lsn} replays to {self.state.digest()[:12]}, logged is {logged[:12]}",
                hint="processors or torch versions differ between worker and replica; "
                "run `everstep chain verify` on the machine that trained",
            )

    def _merge_delta(self, lsn: int, batch: pa.RecordBatch) -> None:
        delta = read_delta(batch)
        if delta is None:
            self.state.expect_next(lsn)
            self.state.lsn = lsn
            return
        indices = None if delta.indices is None else _tensor(delta.indices)
        write_gradient(self._flat, _tensor(delta.values), indices)
        gradients = gradient_views(self._flat, self.slots, set(delta.unused))
        self.state.replay(lsn, gradients, json.loads(batch.column("hyper")[0].as_py()))


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor over a read-only view; it is only read."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(array)


def to_batches(tensors: dict[str, torch.Tensor]) -> list[pa.RecordBatch]:
    """Return tensors as Arrow record batches, one a tensor, sharing their memory where it is contiguous."""
    out = []
    for name, tensor in tensors.items():
        raw = tensor_bytes(tensor)
        data = pa.Array.from_buffers(
            pa.large_binary(), 1, [None, pa.py_buffer(np.array([0, len(raw)], np.int64)), pa.py_buffer(raw)]
        )
        kind = str(tensor.dtype).removeprefix("torch.")
        out.append(
            pa.record_batch(
                [pa.array([name]), pa.array([kind]), pa.array([list(tensor.shape)], pa.list_(pa.int64())), data],
                schema=BASE_SCHEMA,
            )
        )
    return out or [pa.record_batch([pa.array([], f.type) for f in BASE_SCHEMA], schema=BASE_SCHEMA)]


def from_batches(batches: Sequence[pa.RecordBatch]) -> dict[str, torch.Tensor]:
    """Return the tensors of `to_batches`, in memory of their own."""
    out = {}
    for batch in batches:
        for row in range(batch.num_rows):
            raw = batch.column("data")[row].as_buffer()
            dtype = getattr(torch, batch.column("dtype")[row].as_py())
            shape = batch.column("shape")[row].as_py()
            flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw.size else torch.empty(0, dtype=dtype)
            out[batch.column("name")[row].as_py()] = flat.view(shape)
    return out
