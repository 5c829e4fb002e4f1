"""Top-k: exactly k, the lowest index among equals, the same as sorting everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from everstep.compressors import COMPRESSORS, Compressed, Spec, TopK, build_compressor
from everstep.core.errors import UnknownName

torch.set_num_threads(1)


def naive(values: list[float], count: int) -> list[int]:
    order = sorted(range(len(values)), key=lambda at: (-abs(values[at]), at))
    return sorted(order[:count])


def chosen_of(values: torch.Tensor, density: float) -> torch.Tensor:
    sent = TopK(Spec(density)).compress(values, 1)
    assert sent.indices is not None
    return sent.indices


def check(values: torch.Tensor, density: float) -> Compressed:
    before = values.clone()
    chosen = TopK(Spec(density)).compress(values, 1)
    assert chosen.indices is not None
    count, share = chosen.indices.numel(), values.numel() * density
    assert count == 1 if share < 1 else abs(count - share) < 1
    assert torch.equal(values, before)
    assert chosen.indices.dtype == torch.int32 and chosen.values.dtype == torch.float32
    assert chosen.indices.tolist() == naive(values.tolist(), count)
    assert torch.equal(chosen.values, values[chosen.indices])
    return chosen


@given(
    hnp.arrays(np.float32, st.integers(1, 200), elements=st.floats(-1e6, 1e6, width=32)),
    st.floats(0.001, 1.0),
)
@settings(max_examples=200, deadline=None)
def test_as_sorting_everything(values: np.ndarray, density: float) -> None:
    check(torch.tensor(values), density)


@given(hnp.arrays(np.float32, st.integers(1, 60), elements=st.sampled_from([-1.0, 0.0, -0.0, 1.0])), st.floats(0.01, 1))
@settings(max_examples=150, deadline=None)
def test_the_lowest_index_wins_among_equals(values: np.ndarray, density: float) -> None:
    check(torch.tensor(values), density)


@pytest.mark.parametrize("value", [0.0, -0.0, 3.0, 1e-45, 3e38])
def test_of_equal_elements_the_first_are_taken(value: float) -> None:
    assert chosen_of(torch.full((50,), value), 0.2).tolist() == list(range(10))


def test_all_of_it() -> None:
    assert chosen_of(torch.randn(33), 1.0).tolist() == list(range(33))


@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_at_least_one(size: int) -> None:
    assert chosen_of(torch.randn(size), 1e-6).numel() == 1


def test_large_and_sparse() -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).round(decimals=2)
    order = torch.sort(values.abs(), descending=True, stable=True).indices[:2000].sort().values
    assert torch.equal(chosen_of(values, 0.01).long(), order)


@pytest.mark.parametrize(("size", "density", "count"), [(1000, 0.01, 10), (100, 0.25, 25), (7, 0.5, 3)])
def test_the_share_is_what_was_asked_for(size: int, density: float, count: int) -> None:
    assert chosen_of(torch.randn(size), density).numel() == count


def test_the_hint_of_the_last_step_changes_no_choice() -> None:
    topk, generator = TopK(Spec(0.05)), torch.Generator().manual_seed(1)
    for scale in (1.0, 1e-6, 1e6, 0.0, 1.0):
        values = torch.randn(5000, generator=generator) * scale
        sent = topk.compress(values, 1)
        assert sent.indices is not None and sent.indices.tolist() == naive(values.tolist(), 250)


def test_by_name() -> None:
    assert "topk" in COMPRESSORS and build_compressor("none", Spec()) is None
    topk = build_compressor("topk", Spec(0.25))
    assert isinstance(topk, TopK) and topk.spec.density == 0.25
    own = build_compressor("everstep.compressors.topk:TopK", Spec(0.5))
    assert isinstance(own, TopK)
    with pytest.raises(UnknownName, match="topk"):
        build_compressor("topkk", Spec())
