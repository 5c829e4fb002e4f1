"""Adding up sparse rows: C and plain torch agree to the bit, in the order of the rows, and never leave the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.kernels import merge, merge_dense
from everstep.kernels.merge import (
    _merge,
    _merge_cpu,
    _merge_dense,
    _merge_dense_cpu,
    reference_merge,
    reference_merge_dense,
)
from tests.kernels.bits import same_bits

SIZES = [0, 1, 31, 32, 33, 1023, 65_535, 65_536, 65_537, 1_000_000]


def rows(w: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    places = [torch.randperm(n)[:k].sort().values.int() for _ in range(w)]
    values = torch.randn(w, k) * 10 ** (torch.rand(w, k) * 8)  # the order of adding shows in the bits
    values[:, :1] = -0.0
    return torch.stack(places) if w else torch.empty(0, k, dtype=torch.int32), values


def dense(function: Any, indices: torch.Tensor, values: torch.Tensor, n: int, scale: float) -> torch.Tensor:
    out = torch.full((n,), torch.nan)
    function(indices, values, scale, out)
    return out


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("w", [0, 1, 3, 8])
def test_it_is_index_add_row_by_row(w: int, n: int) -> None:
    for k in {0, min(1, n), n // 100, min(n, 1023)}:
        indices, values = rows(w, k, n)
        wanted = torch.zeros(n)
        for row, added in zip(indices, values, strict=True):
            wanted.index_add_(0, row, added)
        anywhere = torch.zeros(n, dtype=torch.bool)
        anywhere[indices.flatten().long()] = True
        for function in (_merge_cpu, reference_merge):
            places, sums = function(indices, values, n)
            assert same_bits(places, anywhere.nonzero().squeeze(1).int()) and same_bits(sums, wanted[anywhere])
        for function in (_merge_dense_cpu, reference_merge_dense):
            assert same_bits(dense(function, indices, values, n, 1.0), wanted)
            assert same_bits(dense(function, indices, values, n, 1 / 3), wanted * (1 / 3))


def test_the_order_of_the_rows_counts() -> None:
    indices = torch.zeros(3, 1, dtype=torch.int32)
    values = torch.tensor([[1e8], [-1e8], [1.0]])
    assert merge_dense(indices, values, 1).item() == 1.0
    assert merge_dense(indices, values.flip(0), 1).item() == 0.0


def test_what_is_not_finite_stays_so() -> None:
    indices, values = torch.tensor([[0, 2], [0, 1]], dtype=torch.int32), torch.tensor([[torch.inf, 1], [-torch.inf, 2]])
    assert same_bits(merge(indices, values, 4)[1], torch.tensor([torch.nan, 2.0, 1.0]))
    assert same_bits(merge_dense(indices, values, 4), torch.tensor([torch.nan, 2.0, 1.0, 0.0]))


def test_out_is_written_and_returned() -> None:
    indices, values = rows(2, 10, 100)
    out = torch.full((100,), torch.nan)
    assert merge_dense(indices, values, 100, scale=0.5, out=out) is out
    assert same_bits(out, merge_dense(indices, values, 100, scale=0.5))


OUTSIDE = [[[0, 10]], [[-1, 3]], [[3, 4], [5, 2**31 - 1]], [[-(2**31), 0]]]


@pytest.mark.parametrize("function", [_merge_cpu, reference_merge])
@pytest.mark.parametrize("wrong", OUTSIDE)
def test_places_outside_are_refused(function: Any, wrong: list[list[int]]) -> None:
    indices = torch.tensor(wrong, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"ascending rows of places in \[0, 10\)"):
        function(indices, torch.ones(indices.shape), 10)


@pytest.mark.parametrize("function", [_merge_dense_cpu, reference_merge_dense])
@pytest.mark.parametrize("wrong", OUTSIDE)
def test_places_outside_are_refused_densely(function: Any, wrong: list[list[int]]) -> None:
    indices = torch.tensor(wrong, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"ascending rows of places in \[0, 10\)"):
        dense(function, indices, torch.ones(indices.shape), 10, 1.0)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_nothing_is_written_outside_whatever_the_rows(data: st.DataObject) -> None:
    n, w, k = data.draw(st.integers(0, 200)), data.draw(st.integers(0, 4)), data.draw(st.integers(0, 30))
    place = st.one_of(st.integers(0, max(0, n - 1)), st.integers(-(2**31), 2**31 - 1))
    indices = torch.tensor(data.draw(st.lists(place, min_size=w * k, max_size=w * k)), dtype=torch.int32).view(w, k)
    fenced = torch.full((n + 128,), 5.0)
    try:
        merge_dense(indices, torch.ones(w, k), n, out=fenced[64 : n + 64])
    except ValueError:
        assert indices.numel()
    else:
        assert ((indices >= 0) & (indices < n)).all()
    assert (fenced[:64] == 5).all() and (fenced[n + 64 :] == 5).all()
    try:
        places, _ = merge(indices, torch.ones(w, k), n)
    except ValueError:
        return
    assert places.equal(indices.unique())


def test_wrong_input_is_refused() -> None:
    indices, values = rows(2, 10, 100)
    for error, call in (
        (TypeError, lambda: merge(indices.long(), values, 100)),
        (TypeError, lambda: merge_dense(indices, values.double(), 100)),
        (ValueError, lambda: merge(indices[0], values[0], 100)),
        (ValueError, lambda: merge(indices, values[:1], 100)),
        (ValueError, lambda: merge(indices.t().contiguous().t(), values, 100)),
        (ValueError, lambda: merge(indices, values, -1)),
        (ValueError, lambda: merge(indices, values, 2**31)),
        (ValueError, lambda: merge_dense(indices, values, 100, out=torch.empty(99))),
        (TypeError, lambda: merge_dense(indices, values, 100, out=torch.empty(100, dtype=torch.float64))),
    ):
        with pytest.raises(error, match="expected"):
            call()


def test_torch_can_trace_them() -> None:
    indices, values = rows(3, 10, 100)
    torch.library.opcheck(_merge, (indices, values, 100))
    torch.library.opcheck(_merge_dense, (indices, values, 0.5, torch.empty(100)))

    def both(indices: torch.Tensor, values: torch.Tensor) -> Any:
        places, sums = merge(indices, values * 2, 100)
        return places + 1, sums + 1, merge_dense(indices, values, 100, scale=0.5) + 1

    traced = torch.compile(both, fullgraph=True, backend="aot_eager")(indices, values)
    assert all(map(same_bits, traced, both(indices, values)))
