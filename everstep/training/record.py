"""The record: one step in the log, by shard, as an Arrow record batch with plain columns.

A worker turns a record into one contiguous buffer (`pack`), a checkpoint actor reads it without copying (`unpack`)
and writes it into a segment as it is. Shard 0 is the step's own: cursor, scalars, changed buffers. Every parameter
shard repeats the little that its replay needs (hyper-parameters, which parameters got no gradient), so that it can be
replayed alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import torch

from everstep import kernels
from everstep.training.delta import Coded, Delta, ShardDelta
from everstep.training.layout import Layout
from everstep.training.state import NOTE, tensor_bytes

DELTA_SCHEMA = pa.schema(
    [
        ("lsn", pa.int64()),
        ("group_epoch", pa.int32()),
        ("skipped", pa.bool_()),  # the step was counted but not taken (non-finite gradient)
        ("hyper", pa.utf8()),  # JSON, one object a parameter group, as used
        ("unused", pa.list_(pa.int32())),  # slots of the shard that got no gradient
        ("places", pa.large_binary()),  # indices from the shard's first element, packed; null when dense
        ("count", pa.int64()),  # how many values there are
        ("values", pa.large_list(pa.float32())),  # null when quantised
        ("codes", pa.large_binary()),  # what quantised values are read from; null when they are not
        ("scales", pa.large_list(pa.float32())),  # one a block of codes
        ("bits", pa.int32()),  # of one code
        ("skip", pa.int32()),  # codes before the first that counts
        ("clip", pa.float64()),  # the factor on what the codes stand for
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


JOINED_BYTES = 1 << 20
UNCOUNTED = (
    "group_epoch", "world_size", "seconds", "digest",
    "indices", "values", "places", "count", "codes", "scales", "bits", "skip", "clip",
)  # fmt: skip


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


def pack(result: StepResult, layout: Layout, shard: int, *, apart: bool = False) -> pa.Buffer:
    """Return one shard's record of a step as one contiguous, immutable buffer.

    Args:
        result: the step.
        layout: where the shard lies.
        shard: its number.
        apart: leave dense values out; they travel on their own.
    """
    batch = _delta_batch(result, layout, shard, apart) if shard else _step_batch(result)
    return batch.serialize()


def unpack(shard: int, data: pa.Buffer, values: pa.Buffer | None = None) -> pa.RecordBatch:
    """Return the record in a buffer made by `pack`, without a copy; `values` are those that travelled on their own."""
    batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema_of(shard))
    if values is None:
        return batch
    place, count = batch.schema.get_field_index("values"), batch.column("count")[0].as_py()
    flat = pa.Array.from_buffers(pa.float32(), count, [None, pa.py_buffer(values)])
    listed = pa.LargeListArray.from_arrays(pa.array([0, count], pa.int64()), flat)
    return batch.set_column(place, batch.schema.field(place), listed)


def joined(batches: Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Return records as they are stored: small ones several a batch, since each batch takes a kilobyte of its own."""
    out: list[list[pa.RecordBatch]] = []
    size = JOINED_BYTES
    for batch in batches:
        size += batch.nbytes
        if size > JOINED_BYTES:
            out.append([])
            size = batch.nbytes
        out[-1].append(batch)
    return [part[0] if len(part) == 1 else pa.Table.from_batches(part).combine_chunks().to_batches()[0] for part in out]


def rows(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the records of a stored batch, one by one, without copying them."""
    return (batch.slice(place, 1) for place in range(batch.num_rows))


def lsn_of(batch: pa.RecordBatch) -> int:
    """Return the step of a record."""
    return int(batch.column("lsn")[0].as_py())


def payload_crc(batch: pa.RecordBatch) -> int:
    """Return a CRC32C of what a step did, leaving out who logged it, how long it took, and how it is stored."""
    told = {name: batch.column(name).to_pylist() for name in batch.schema.names if name not in UNCOUNTED}
    crc = int(google_crc32c.value(repr(told).encode()))
    if "unused" in batch.schema.names and (delta := read_delta(batch)):
        crc = google_crc32c.extend(crc, delta.values.tobytes())
        crc = crc if delta.indices is None else google_crc32c.extend(crc, delta.indices.tobytes())
    return crc


def _delta_batch(result: StepResult, layout: Layout, shard: int, apart: bool) -> pa.RecordBatch:
    span = layout.range_of(shard)
    part = result.delta.part(span) if result.delta else None
    row: dict[str, Any] = {
        "lsn": result.lsn,
        "group_epoch": result.group_epoch,
        "skipped": part is None,
        "hyper": json.dumps(result.hyper),
        "unused": part.unused if part else (),
        "digest": result.digests.get(shard),
    }
    long: dict[str, pa.Array] = {}
    if part is not None:
        row |= {"count": len(part.values), "clip": part.clip}
        if part.indices is not None:
            row["places"] = kernels.pack(torch.from_numpy(part.indices), span.stop - span.start).numpy().tobytes()
        if part.coded is None and not apart:
            long["values"] = _one_list(part.values)
        elif part.coded is not None:
            coded = part.coded
            row |= {"codes": coded.codes, "bits": coded.bits, "skip": coded.skip}
            long["scales"] = _one_list(coded.scales)
    columns = [long.get(f.name, pa.array([row.get(f.name)], f.type)) for f in DELTA_SCHEMA]
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
    """Return the delta in a parameter shard's record as consumed, or None for a skipped step.

    Dense values that were not clipped are views into the record.
    """
    if batch.column("skipped")[0].as_py():
        return None
    unused = tuple(batch.column("unused")[0].as_py())
    if "indices" in batch.schema.names:  # object format 1
        indices = None if batch.column("indices").null_count else _listed(batch, "indices")
        return ShardDelta(_listed(batch, "values"), indices, unused)
    count, clip, places = batch.column("count")[0].as_py(), batch.column("clip")[0].as_py(), batch.column("places")
    indices = None if places.null_count else kernels.unpack(_bytes(places), count).numpy()
    codes = batch.column("codes")
    if codes.null_count:
        return ShardDelta(_listed(batch, "values"), indices, unused, None, clip).consumed()
    bits, skip = (batch.column(name)[0].as_py() for name in ("bits", "skip"))
    coded = Coded(codes[0].as_py(), _listed(batch, "scales"), bits, skip)
    return ShardDelta(coded.values(count), indices, unused, coded, clip).consumed()


def _listed(batch: pa.RecordBatch, name: str) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = batch.column(name).flatten().to_numpy(zero_copy_only=True)
    return values


def _bytes(column: pa.Array) -> torch.Tensor:
    raw = bytearray(column[0].as_py())
    return torch.frombuffer(raw, dtype=torch.uint8)


def read_buffers(batch: pa.RecordBatch, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the changed buffers in a step record, typed and, but for notes, shaped as those in `like`."""
    names, data = batch.column("buffer_names")[0].as_py(), batch.column("buffer_data")[0].as_py()
    flat = {n: torch.frombuffer(bytearray(raw), dtype=like[n].dtype) for n, raw in zip(names, data, strict=True)}
    return {n: value if n.startswith(NOTE) else value.view(like[n].shape) for n, value in flat.items()}
