"""One shard's state in a replica, and how it is written as a base and read back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import torch

from everstep.core.errors import StateMismatch
from everstep.training.delta import ShardDelta, gradient_views
from everstep.training.layout import Slot
from everstep.training.optimizer import spares_gradients
from everstep.training.record import lsn_of, read_buffers, read_delta
from everstep.training.state import TrainState, combine_digests, tensor_bytes

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
        self._flat: torch.Tensor | None = None  # gradient; made when a record needs it
        self._written: torch.Tensor | None = None  # where `_flat` is not zero; None: anywhere

    @property
    def parameter_bytes(self) -> int:
        """Bytes of its parameters, or of its buffers; the optimizer's state is in proportion to them."""
        return sum(tensor.nbytes for tensor in (*self.state.params.values(), *self.state.fixed.values()))

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
        gradients = gradient_views(self._gradient(delta), self.slots, set(delta.unused))
        self.state.replay(lsn, gradients, json.loads(batch.column("hyper")[0].as_py()))

    def _gradient(self, delta: ShardDelta) -> torch.Tensor:
        """Return a delta as a flat gradient: where the optimizer only reads gradients, the record's own memory."""
        values = _tensor(delta.values)
        spared = self.state.optimizer is not None and spares_gradients(self.state.optimizer)
        if delta.indices is None and spared:
            return values
        if self._flat is None:
            self._flat = torch.empty(self.slots[-1].stop - self.slots[0].start)
        if delta.indices is None:
            self._flat.copy_(values)
            self._written = None
            return self._flat
        if self._written is None or not spared:
            self._flat.zero_()
        else:
            self._flat.index_fill_(0, self._written, 0.0)
        self._written = _tensor(delta.indices).long()
        self._flat.index_copy_(0, self._written, values)  # a third of the time of `flat[indices] = values`
        return self._flat


def digest_of(states: Iterable[ShardState]) -> str:
    """Return the digest of the state that these shards make up together, see `state.combine_digests`."""
    return combine_digests({n: d for state in states for n, d in state.state.tensor_digests().items()})


class _Memory:
    """Memory of somebody else, as numpy takes it: writable in form, alive as long as anything that looks at it."""

    def __init__(self, owner: object, address: int, size: int) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def _view(owner: object, address: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over `size` bytes that belong to `owner`; torch knows no read-only memory, so its users have to."""
    if not size:
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(np.asarray(_Memory(owner, address, size))).view(dtype)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor over a read-only array of fp32 or int32; it is only read."""
    dtype = torch.float32 if array.dtype == np.float32 else torch.int32
    return _view(array, array.__array_interface__["data"][0], array.nbytes, dtype)


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


def from_batches(batches: Sequence[pa.RecordBatch], *, adopt: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of `to_batches`.

    Args:
        batches: as read from an object.
        adopt: let them lie in the object's own bytes where those are writable, as a store gives them away; the object
            may not be used for anything else. Otherwise they are copied to memory of their own.
    """
    out = {}
    for batch in batches:
        names, kinds, shapes = (batch.column(name).to_pylist() for name in ("name", "dtype", "shape"))
        data = batch.column("data")
        for row, (name, kind, shape) in enumerate(zip(names, kinds, shapes, strict=True)):
            out[name] = _row(data, row, getattr(torch, kind), adopt=adopt).view(shape)
    return out


def _row(data: pa.LargeBinaryArray, row: int, dtype: torch.dtype, *, adopt: bool) -> torch.Tensor:
    """One value of a column as a flat tensor. Neither `as_py` nor `as_buffer`: both copy."""
    _, offsets, values = data.buffers()
    start, stop = np.frombuffer(offsets, np.int64)[data.offset + row :][:2].tolist()
    if start == stop:
        return torch.empty(0, dtype=dtype)
    flat = _view(values, values.address + start, stop - start, dtype)
    return flat if adopt and _root(values).is_mutable else flat.clone()


def _root(buffer: pa.Buffer) -> pa.Buffer:
    """The memory that a buffer is a slice of: slices of a file count as immutable, whatever its bytes are."""
    while buffer.parent is not None:
        buffer = buffer.parent
    return buffer
