"""The record: one step in the log, by shard, as an Arrow record batch with plain columns.

A worker turns a record into one contiguous buffer (`pack`), a checkpoint actor reads it without copying (`unpack`)
and writes it into a segment as it is. Shard 0 is the step's own: cursor, scalars, changed buffers. Every parameter
shard repeats the little that its replay needs (hyper-parameters, which parameters got no gradient), so that it can be
replayed alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import torch

from everstep.training.delta import Delta, ShardDelta
from everstep.training.layout import Layout
from everstep.training.state import NOTE, tensor_bytes

DELTA_SCHEMA = pa.schema(
    [
        ("lsn", pa.int64()),
        ("group_epoch", pa.int32()),
        ("skipped", pa.bool_()),  # the step was counted but not taken (non-finite gradient)
        ("hyper", pa.utf8()),  # JSON, one object a parameter group, as used
        ("unused", pa.list_(pa.int32())),  # slots of the shard that got no gradient
        ("indices", pa.large_list(pa.int32())),  # from the shard's first element; null when dense
        ("values", pa.large_list(pa.float32())),
        ("digest", pa.utf8()),  # of the shard's state after the step, every few steps; else null
    ]
)
STEP_SCHEMA = pa.schema(
    [
        ("lsn", pa.int64()),
        ("group_epoch", pa.int32()),
        ("skipped", pa.bool_()),
        ("loss", pa.float64()),
        ("grad_norm", pa.float64()),  # of the whole delta, before clipping
        ("clip", pa.float64()),  # the factor that clipping by global norm put on every value
        ("lr", pa.float64()),  # of the first group
        ("samples", pa.int64()),  # consumed since the start of the run: the cursor
        ("data_epoch", pa.int64()),
        ("world_size", pa.int32()),
        ("seconds", pa.float64()),
        ("hyper", pa.utf8()),
        ("buffer_names", pa.list_(pa.utf8())),
        ("buffer_data", pa.list_(pa.large_binary())),
        ("digest", pa.utf8()),
    ]
)


def schema_of(shard: int) -> pa.Schema:
    """Return the schema of a shard's records."""
    return DELTA_SCHEMA if shard else STEP_SCHEMA


@dataclass(frozen=True)
class StepResult:
    """All that one finished step leaves for the log.

    Attributes:
        lsn: the step it led to.
        group_epoch: the formation of the group that took it.
        delta: None when the step was skipped.
        scalars: the plain columns of shard 0.
        hyper: each parameter group's hyper-parameters as used.
        buffers: changed buffers by canonical name, after the step.
        digests: by shard, of its state after the step; only for owned shards, every few steps.
    """

    lsn: int
    group_epoch: int
    delta: Delta | None
    scalars: Mapping[str, float | int]
    hyper: Sequence[Mapping[str, Any]]
    buffers: Mapping[str, torch.Tensor]
    digests: Mapping[int, str]


def pack(result: StepResult, layout: Layout, shard: int) -> pa.Buffer:
    """Return one shard's record of a step as one contiguous, immutable buffer."""
    batch = _delta_batch(result, layout, shard) if shard else _step_batch(result)
    return batch.serialize()


def unpack(shard: int, data: pa.Buffer) -> pa.RecordBatch:
    """Return the record in a buffer made by `pack`, without a copy."""
    return pa.ipc.read_record_batch(pa.py_buffer(data), schema_of(shard))


def lsn_of(batch: pa.RecordBatch) -> int:
    """Return the step of a record."""
    return int(batch.column("lsn")[0].as_py())


def payload_crc(batch: pa.RecordBatch) -> int:
    """Return a CRC32C of what a step did, leaving out who logged it and how long it took."""
    crc = 0
    for field in batch.schema:
        column = batch.column(field.name)
        if field.name in ("group_epoch", "world_size", "seconds", "digest"):
            continue
        if pa.types.is_large_list(field.type) and column.null_count == 0:
            crc = google_crc32c.extend(crc, column.values.to_numpy(zero_copy_only=True).tobytes())
        else:
            crc = google_crc32c.extend(crc, repr(column.to_pylist()).encode())
    return crc


def _delta_batch(result: StepResult, layout: Layout, shard: int) -> pa.RecordBatch:
    part = result.delta.part(layout.range_of(shard)) if result.delta else None
    indices = None if part is None else part.indices
    columns = [
        pa.array([result.lsn], pa.int64()),
        pa.array([result.group_epoch], pa.int32()),
        pa.array([part is None]),
        pa.array([json.dumps(result.hyper)]),
        pa.array([part.unused if part else ()], pa.list_(pa.int32())),
        pa.array([None], pa.large_list(pa.int32())) if indices is None else _one_list(indices),
        _one_list(part.values if part else np.empty(0, np.float32)),
        pa.array([result.digests.get(shard)], pa.utf8()),
    ]
    return pa.record_batch(columns, schema=DELTA_SCHEMA)


def _step_batch(result: StepResult) -> pa.RecordBatch:
    row = {
        "lsn": result.lsn,
        "group_epoch": result.group_epoch,
        "skipped": result.delta is None,
        "hyper": json.dumps(result.hyper),
        "buffer_names": list(result.buffers),
        "buffer_data": [bytes(tensor_bytes(tensor)) for tensor in result.buffers.values()],
        "digest": result.digests.get(0),
        **result.scalars,
    }
    return pa.record_batch([pa.array([row[f.name]], f.type) for f in STEP_SCHEMA], schema=STEP_SCHEMA)


def _one_list(values: np.ndarray[Any, Any]) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), pa.array(values))


def read_delta(batch: pa.RecordBatch) -> ShardDelta | None:
    """Return the delta in a parameter shard's record: views into its buffer, or None for a skipped step."""
    if batch.column("skipped")[0].as_py():
        return None
    indices = batch.column("indices")
    return ShardDelta(
        values=batch.column("values").values.to_numpy(zero_copy_only=True),
        indices=indices.values.to_numpy(zero_copy_only=True) if indices.null_count == 0 else None,
        unused=tuple(batch.column("unused")[0].as_py()),
    )


def read_buffers(batch: pa.RecordBatch, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the changed buffers in a step record, typed and, but for notes, shaped as those in `like`."""
    names, data = batch.column("buffer_names")[0].as_py(), batch.column("buffer_data")[0].as_py()
    flat = {n: torch.frombuffer(bytearray(raw), dtype=like[n].dtype) for n, raw in zip(names, data, strict=True)}
    return {n: value if n.startswith(NOTE) else value.view(like[n].shape) for n, value in flat.items()}
