"""Layout, delta and record: nothing is lost or changed between the flat gradient and what a replica reads."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from everstep.storage.chain import Chain
from everstep.storage.memory import MemoryStore
from everstep.training import record
from everstep.training.delta import Delta, gradient_views, untouched, write_gradient
from everstep.training.layout import Layout, layout_of, plan_layout
from everstep.training.record import (
    StepResult,
    joined,
    lsn_of,
    pack,
    payload_crc,
    read_buffers,
    read_delta,
    rows,
    schema_of,
    unpack,
)

SCALARS = {
    "loss": 0.5,
    "grad_norm": 2.0,
    "clip": 1.0,
    "lr": 0.1,
    "samples": 32,
    "data_epoch": 0,
    "world_size": 2,
    "seconds": 0.25,
}
HYPER = [{"lr": 0.1, "betas": [0.9, 0.999]}, {"lr": 1e-3 / 3, "betas": [0.8, 0.99]}]


def layout_for(sizes: list[int], shards: int) -> Layout:
    return plan_layout([f"p{i}" for i in range(len(sizes))], [torch.empty(s) for s in sizes], [0] * len(sizes), shards)


def result_of(delta: Delta | None, **changes: Any) -> StepResult:
    given = {"lsn": 7, "group_epoch": 1, "delta": delta, "scalars": SCALARS, "hyper": HYPER, "buffers": {}}
    return StepResult(**{**given, "digests": {}, **changes})


def dense(size: int, unused: frozenset[int] = frozenset()) -> Delta:
    return Delta(np.random.default_rng(0).standard_normal(size).astype(np.float32), None, unused)


def sparse(size: int, count: int, unused: frozenset[int] = frozenset()) -> Delta:
    draw = np.random.default_rng(1)
    indices = np.sort(draw.choice(size, count, replace=False)).astype(np.int32)
    return Delta(draw.standard_normal(count).astype(np.float32), indices, unused)


SIZES = [5, 40, 1, 17, 0, 64, 3]
TOTAL = sum(SIZES)


# --- layout


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(1, 15))
@settings(max_examples=150, deadline=None)
def test_shards_are_balanced_runs_of_whole_tensors(sizes: list[int], shards: int) -> None:
    layout = layout_for(sizes, shards)
    ranges = layout.ranges
    assert len(ranges) == min(shards, len(sizes))
    assert [part.shard for part in ranges] == list(range(1, len(ranges) + 1))
    assert list(layout.shards) == [0, *(part.shard for part in ranges)]
    assert (ranges[0].first, ranges[-1].last) == (0, len(sizes))
    assert all(
        one.last == other.first and one.stop == other.start for one, other in zip(ranges, ranges[1:], strict=False)
    )
    for part in ranges:
        slots = layout.slots_of(part.shard)
        assert slots and (slots[0].start, slots[-1].stop) == (part.start, part.stop)
        assert part.stop - part.start <= layout.size / len(ranges) + max(sizes)
    assert layout.size == sum(sizes)


def test_equal_tensors_are_cut_evenly() -> None:
    layout = layout_for([10] * 12, 4)
    assert [part.stop - part.start for part in layout.ranges] == [30, 30, 30, 30]


def test_a_layout_follows_the_model_not_the_groups_and_counts_tied_parameters_once() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[2].weight = model[1].weight
    layout = layout_of(model, [["1.weight"], ["0.bias", "0.weight"]], 2)
    assert [slot.name for slot in layout.slots] == ["0.weight", "0.bias", "1.weight"]
    assert [slot.group for slot in layout.slots] == [1, 1, 0]
    assert layout.size == 6 + 3 + 9


# --- delta


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 9])
@pytest.mark.parametrize("delta", [dense(TOTAL, frozenset({1, 6})), sparse(TOTAL, 30, frozenset({0, 2}))])
def test_records_read_back_as_they_were_and_together_are_the_whole(delta: Delta, shards: int) -> None:
    layout = layout_for(SIZES, shards)
    flat, unused = torch.full((TOTAL,), torch.nan), set()
    whole = torch.full((TOTAL,), torch.nan)
    write_gradient(whole, *_tensors(delta.values, delta.indices))
    for part in layout.ranges:
        batch = unpack(part.shard, pack(result_of(delta), layout, part.shard))
        got, sent = read_delta(batch), delta.part(part)
        assert got is not None
        assert got.values.tobytes() == sent.values.tobytes() and got.values.dtype == np.float32
        assert (got.indices is None) == (delta.indices is None)
        if got.indices is not None:
            assert got.indices.dtype == np.int32 and got.indices.tolist() == sent.indices.tolist()  # type: ignore[union-attr]
        write_gradient(flat[part.start : part.stop], *_tensors(got.values, got.indices))
        unused |= {part.first + at for at in got.unused}
    assert flat.numpy().tobytes() == whole.numpy().tobytes()
    assert unused == delta.unused


@given(st.sets(st.integers(0, TOTAL - 1)), st.integers(1, 8), st.sets(st.integers(0, len(SIZES) - 1)))
@settings(max_examples=60, deadline=None)
def test_any_sparse_delta_is_cut_without_loss(places: set[int], shards: int, unused: set[int]) -> None:
    layout = layout_for(SIZES, shards)
    indices = np.array(sorted(places), np.int32)
    delta = Delta(np.arange(len(indices), dtype=np.float32), indices, frozenset(unused))
    parts = [(part, delta.part(part)) for part in layout.ranges]
    assert [int(i) + p.start for p, d in parts for i in d.indices] == sorted(places)  # type: ignore[union-attr]
    assert np.concatenate([d.values for _, d in parts]).tolist() == delta.values.tolist()
    assert {at + p.first for p, d in parts for at in d.unused} == unused


def _tensors(values: np.ndarray, indices: np.ndarray | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.tensor(values), None if indices is None else torch.tensor(indices)


def test_writing_a_delta_onto_itself_copies_nothing_and_a_sparse_one_clears_the_rest() -> None:
    flat = torch.arange(4.0)
    write_gradient(flat, flat[:], None)
    assert flat.tolist() == [0, 1, 2, 3]
    write_gradient(flat, torch.tensor([5.0]), torch.tensor([2]))
    assert flat.tolist() == [0, 0, 5, 0]


def test_gradients_are_views_in_the_parameters_shapes_and_none_where_unused() -> None:
    layout = plan_layout(["a", "b", "c"], [torch.empty(2, 3), torch.empty(()), torch.empty(4)], [0] * 3, 2)
    flat = torch.arange(11.0)
    views = gradient_views(flat, layout.slots, {2})
    assert views["a"].shape == (2, 3) and views["b"].shape == () and views["c"] is None  # type: ignore[union-attr]
    assert views["a"].data_ptr() == flat.data_ptr() and float(views["b"]) == 6  # type: ignore[union-attr,arg-type]
    part = gradient_views(flat[6:], layout.slots[1:], set())
    assert float(part["b"]) == 6 and part["c"].tolist() == [7, 8, 9, 10]  # type: ignore[union-attr,arg-type]


def test_a_parameter_is_untouched_only_if_no_sparse_index_names_it() -> None:
    layout = layout_for([3, 2, 4], 1)
    used = np.array([True, False, False])
    assert untouched(layout, used, None) == {1, 2}
    assert untouched(layout, used, np.array([0, 4], np.int64)) == {2}
    assert untouched(layout, used, np.array([5, 8], np.int64)) == {1}
    assert untouched(layout, np.array([True] * 3), np.array([0], np.int64)) == frozenset()


# --- record


def test_a_skipped_step_has_a_record_without_a_delta() -> None:
    layout = layout_for(SIZES, 3)
    for shard in layout.shards:
        batch = unpack(shard, pack(result_of(None), layout, shard))
        assert batch.column("skipped")[0].as_py() is True
        assert lsn_of(batch) == 7
        assert shard == 0 or read_delta(batch) is None
    assert not unpack(1, pack(result_of(dense(TOTAL)), layout, 1)).column("skipped")[0].as_py()


def test_the_step_record_holds_scalars_digest_and_changed_buffers_of_any_type() -> None:
    buffers = {
        "buffer/mean": torch.randn(3, 2),
        "buffer/count": torch.tensor(5),
        "buffer/mask": torch.tensor([True, False, True]),
        "buffer/half": torch.randn(4).bfloat16(),
    }
    layout = layout_for(SIZES, 2)
    batch = unpack(0, pack(result_of(dense(TOTAL), buffers=buffers, digests={0: "d0", 1: "d1"}), layout, 0))
    row = batch.to_pylist()[0]
    assert {key: row[key] for key in SCALARS} == SCALARS
    assert json.loads(row["hyper"]) == HYPER and row["digest"] == "d0" and row["group_epoch"] == 1
    read = read_buffers(batch, {name: torch.zeros_like(value) for name, value in buffers.items()})
    assert list(read) == list(buffers)
    for name, value in buffers.items():
        assert read[name].dtype == value.dtype and torch.equal(read[name], value)
    first = unpack(1, pack(result_of(dense(TOTAL), digests={0: "d0", 1: "d1"}), layout, 1))
    second = unpack(2, pack(result_of(dense(TOTAL), digests={0: "d0", 1: "d1"}), layout, 2))
    assert first.column("digest")[0].as_py() == "d1" and second.column("digest")[0].as_py() is None


def test_reading_a_record_copies_nothing() -> None:
    layout = layout_for([1000], 1)
    data = pack(result_of(dense(1000)), layout, 1)
    delta = read_delta(unpack(1, data))
    assert delta is not None
    assert data.address <= delta.values.ctypes.data < data.address + data.size
    assert not delta.values.flags.writeable


# --- checksum


def variants() -> dict[str, tuple[int, StepResult]]:
    base = sparse(TOTAL, 30)
    assert base.indices is not None
    values, indices = base.values.copy(), base.indices.copy()
    values[3] = np.nextafter(values[3], np.float32(np.inf))
    free = next(i for i in range(TOTAL) if i not in base.indices)
    moved = np.sort(np.append(np.delete(indices, 5), np.int32(free)))
    buffers = {"buffer/mean": torch.arange(4.0)}
    step = result_of(base, buffers=buffers)
    return {
        "value": (1, result_of(dataclasses.replace(base, values=values))),
        "index": (1, result_of(dataclasses.replace(base, indices=moved))),
        "unused": (1, result_of(dataclasses.replace(base, unused=frozenset({0})))),
        "hyper": (1, result_of(base, hyper=[{**HYPER[0], "lr": 0.2}, HYPER[1]])),
        "lsn": (1, result_of(base, lsn=8)),
        "skipped": (1, result_of(None)),
        "dense": (1, result_of(Delta(base.values, None, frozenset()))),
        "buffer": (0, dataclasses.replace(step, buffers={"buffer/mean": torch.arange(4.0) + 1e-6})),
        "buffer name": (0, dataclasses.replace(step, buffers={"buffer/other": torch.arange(4.0)})),
        "no buffer": (0, dataclasses.replace(step, buffers={})),
        "loss": (0, dataclasses.replace(step, scalars={**SCALARS, "loss": 0.5000001})),
    }


@pytest.mark.parametrize("what", list(variants()))
def test_the_checksum_tells_records_apart(what: str) -> None:
    shard, other = variants()[what]
    layout = layout_for(SIZES, 1)
    buffers = {"buffer/mean": torch.arange(4.0)} if shard == 0 else {}
    base = result_of(sparse(TOTAL, 30), buffers=buffers)
    one = payload_crc(unpack(shard, pack(base, layout, shard)))
    assert one != payload_crc(unpack(shard, pack(other, layout, shard)))


def test_the_checksum_leaves_out_who_logged_it_and_how_long_it_took() -> None:
    layout = layout_for(SIZES, 2)
    for delta in (dense(TOTAL), sparse(TOTAL, 20), None):
        for shard in layout.shards:
            one = result_of(delta)
            other = result_of(
                delta, group_epoch=9, scalars={**SCALARS, "seconds": 99.0, "world_size": 5}, digests={0: "x", 1: "y"}
            )
            assert payload_crc(unpack(shard, pack(one, layout, shard))) == payload_crc(
                unpack(shard, pack(other, layout, shard))
            )


@pytest.mark.parametrize("kind", ["dense", "sparse", "empty", "skipped"])
def test_a_record_has_the_same_checksum_when_read_back_from_a_segment(kind: str) -> None:
    layout = layout_for(SIZES, 2)
    nothing = Delta(np.empty(0, np.float32), np.empty(0, np.int32), frozenset())
    delta = {"dense": dense(TOTAL), "sparse": sparse(TOTAL, 20), "empty": nothing, "skipped": None}[kind]
    buffers = {"buffer/mean": torch.randn(3), "buffer/count": torch.tensor(5)}
    chain = Chain.create(MemoryStore(), "r", settings={}, shards=3, exactness="bitwise")
    for shard in layout.shards:
        sent = [unpack(shard, pack(result_of(delta, lsn=lsn, buffers=buffers), layout, shard)) for lsn in (1, 2, 3)]
        key = chain.put_segment(shard, 1, 3, sent)
        read = chain.read(key).batches
        assert [lsn_of(batch) for batch in read] == [1, 2, 3]
        assert [payload_crc(batch) for batch in read] == [payload_crc(batch) for batch in sent]
        assert len({payload_crc(batch) for batch in read}) == 3
        if shard and delta is not None:
            got = read_delta(read[1])
            assert got is not None and got.values.tobytes() == delta.part(layout.range_of(shard)).values.tobytes()


def test_a_segment_is_a_table_for_other_tools() -> None:
    layout = layout_for(SIZES, 1)
    batches = [unpack(0, pack(result_of(dense(TOTAL), lsn=lsn), layout, 0)) for lsn in (1, 2)]
    table = pa.Table.from_batches(batches)
    assert table.schema.equals(schema_of(0)) and table.column("lsn").to_pylist() == [1, 2]


# --- several records in one batch


def test_small_records_share_a_batch_and_read_back_one_by_one() -> None:
    layout = layout_for(SIZES, 2)
    deltas = [sparse(TOTAL, 30), None, dense(TOTAL, frozenset({1})), sparse(TOTAL, 1), dense(TOTAL)]
    for shard in layout.shards:
        sent = [unpack(shard, pack(result_of(delta, lsn=at), layout, shard)) for at, delta in enumerate(deltas, 1)]
        (whole,) = joined(sent)
        assert whole.num_rows == len(deltas)
        read = list(rows(whole))
        assert [lsn_of(batch) for batch in read] == [1, 2, 3, 4, 5]
        assert [payload_crc(batch) for batch in read] == [payload_crc(batch) for batch in sent]
        for one, other in zip(read, sent, strict=True):
            assert unpack(shard, one.serialize()).equals(other)


def test_large_records_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_for(SIZES, 1)
    sent = [unpack(1, pack(result_of(dense(TOTAL), lsn=lsn), layout, 1)) for lsn in (1, 2, 3, 4)]
    monkeypatch.setattr(record, "JOINED_BYTES", 2 * sent[0].nbytes)
    assert [batch.num_rows for batch in joined(sent)] == [2, 2]
    monkeypatch.setattr(record, "JOINED_BYTES", sent[0].nbytes - 1)
    alone = joined(sent)
    assert [batch.num_rows for batch in alone] == [1, 1, 1, 1] and alone[0] is sent[0]
    assert joined([]) == []
