"""Exact top-k with error feedback: C and plain torch against a naive twin, whatever the hint and the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from everstep.kernels import topk_ef
from everstep.kernels.topk_ef import _cpu, _op, reference
from tests.kernels.bits import same_bits

SIZES = [0, 1, 31, 32, 33, 1023, 100_001, 1_000_000]
LARGE = 5_000  # above it, plain torch stands in for the twin


def normal(n: int) -> torch.Tensor:
    return torch.randn(n)


def ties(n: int) -> torch.Tensor:
    return torch.randint(-3, 4, (n,)).float()


def rising(n: int) -> torch.Tensor:
    return torch.arange(n).float()  # every element is a candidate when it comes


def odd(n: int) -> torch.Tensor:
    x = torch.randn(n)
    for at, value in enumerate([torch.nan, torch.inf, -torch.inf, -0.0, 1e-45, -1e-40, 3.4e38]):
        x[at::11] = value
    return x


INPUTS: list[Callable[[int], torch.Tensor]] = [normal, ties, rising, odd, torch.ones, torch.zeros]


def twin(accumulated: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Sort by magnitude, then by place; returns places, values, residual and k-th magnitude."""
    x = accumulated.numpy()
    finite = np.isfinite(x)
    size = np.where(finite, np.abs(x), 0)
    chosen = np.sort(np.lexsort((np.arange(len(x)), -size))[:k])
    left = x.copy()
    left[chosen[finite[chosen]]] = 0
    kth = (size[chosen].min() if k else 0.0) if finite.all() else np.nan
    return chosen, np.where(finite, x, 0)[chosen], left, kth


def check(gradient: torch.Tensor, residual: torch.Tensor | None, k: int, hint: float, function: Any) -> None:
    n, given = len(gradient), gradient.clone()
    out, bound = None if residual is None else torch.full((n,), 7.0), torch.tensor([hint])
    indices, values = function(gradient, residual, k, out, bound)
    accumulated = gradient if residual is None else residual + gradient
    assert same_bits(gradient, given)
    if n <= LARGE:
        places, sent, left, kth = twin(accumulated, k)
        wanted = torch.from_numpy(places).int(), torch.from_numpy(sent)
        last = torch.tensor([kth], dtype=torch.float32)
    else:
        left, last = torch.full((n,), 7.0), torch.zeros(1)
        wanted = reference(gradient, torch.zeros(n) if residual is None else residual, k, left, last)
    assert indices.dtype == torch.int32 and same_bits(indices, wanted[0]) and same_bits(values, wanted[1])
    assert same_bits(bound, last)
    assert out is None or same_bits(out, torch.as_tensor(left))


@pytest.mark.parametrize("make", INPUTS)
@pytest.mark.parametrize("n", [n for n in SIZES if n <= LARGE])
@pytest.mark.parametrize("function", [_cpu, reference])
def test_it_is_what_sorting_gives(function: Any, n: int, make: Callable[[int], torch.Tensor]) -> None:
    gradient, residual = make(n), torch.randn(n) if make in (normal, odd) else torch.zeros(n)
    for k in {0, min(1, n), n // 100, n // 2, n}:
        for hint in (0.0, torch.nan, 1e-3, 2.0, 1e30, torch.inf, -1.0):
            check(gradient, residual, k, hint, function)
        check(gradient, None, k, 0.0, function)


@pytest.mark.parametrize("make", INPUTS)
def test_large_ones_and_those_that_overflow_the_candidates(make: Callable[[int], torch.Tensor]) -> None:
    n = 300_001  # room for 65536 + 2 k candidates: without a bound they are cut several times
    gradient, residual = make(n), torch.randn(n) if make in (normal, odd) else torch.zeros(n)
    for k, hint in [(0, 0.0), (1, 0.0), (3000, 0.0), (3000, 1e30), (100_000, torch.nan), (n, 1.0)]:
        check(gradient, residual, k, hint, _cpu)


@pytest.mark.parametrize("n", [n for n in SIZES if n > LARGE])
def test_the_bound_of_one_step_serves_the_next(n: int) -> None:
    residual, bound = torch.zeros(n), torch.zeros(1)
    for _ in range(3):
        gradient, out = torch.randn(n), torch.empty(n)
        check(gradient, residual, n // 100, float(bound), _cpu)
        topk_ef(gradient, residual, n // 100, out=out, bound=bound)
        residual = out


@pytest.mark.parametrize("function", [_cpu, reference])
def test_in_place_is_the_same(function: Any) -> None:
    gradient, residual = odd(1023), normal(1023)
    out = torch.empty(1023)
    wanted = function(gradient, residual, 77, out, None)
    got = function(gradient, residual, 77, residual, None)
    assert all(map(same_bits, (*got, residual), (*wanted, out)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_what_is_sent_and_what_is_left_is_what_there_was(data: st.DataObject) -> None:
    n = data.draw(st.integers(0, 200))
    floats = hnp.arrays(np.float32, n, elements=st.floats(width=32))
    with np.errstate(all="ignore"):
        gradient, residual = (torch.from_numpy(data.draw(floats)) for _ in range(2))
    k, hint = data.draw(st.integers(0, n)), data.draw(st.floats(width=32))
    check(gradient, residual, k, hint, _cpu)
    out = torch.empty(n)
    indices, values = topk_ef(gradient, residual, k, out=out)
    accumulated = residual + gradient
    sent = torch.zeros(n).index_put((indices.long(),), values)
    finite = accumulated.isfinite()
    assert torch.equal((sent + out)[finite], accumulated[finite]) and not (sent[~finite] != 0).any()
    assert same_bits(out[~finite], accumulated[~finite])


def test_what_is_not_finite_is_reported_and_never_sent() -> None:
    gradient, out, bound = torch.tensor([1.0, torch.nan, -3.0, torch.inf]), torch.empty(4), torch.zeros(1)
    indices, values = topk_ef(gradient, torch.zeros(4), 3, out=out, bound=bound)
    assert indices.tolist() == [0, 1, 2] and values.tolist() == [1.0, 0.0, -3.0]
    assert bound.isnan() and same_bits(out, torch.tensor([0.0, torch.nan, 0.0, torch.inf]))


def test_wrong_input_is_refused() -> None:
    x, out = torch.randn(10), torch.empty(10)
    wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (ValueError, "k = 11, n = 10", (x, None, 11), {}),
        (ValueError, "k = -1", (x, None, -1), {}),
        (ValueError, "if and only if", (x, x, 1), {}),
        (ValueError, "if and only if", (x, None, 1), {"out": out}),
        (ValueError, r"shape \(10,\)", (x, x[:9], 1), {"out": out}),
        (ValueError, "contiguous", (torch.randn(20)[::2], None, 1), {}),
        (ValueError, r"bound contiguous, of shape \(1,\)", (x, None, 1), {"bound": torch.zeros(())}),
        (ValueError, "not to be written", (x, out, 1), {"out": x}),
        (TypeError, "expected gradient as float32", (x.double(), None, 1), {}),
        (TypeError, "expected out as float32", (x, x, 1), {"out": out.double()}),
    ]
    for error, message, arguments, named in wrong:
        with pytest.raises(error, match=message):
            topk_ef(*arguments, **named)


def test_torch_can_trace_it() -> None:
    x, y = torch.randn(1000), torch.randn(1000)
    for bound in (None, torch.ones(1)):
        torch.library.opcheck(_op, (x, y, 10, torch.empty(1000), bound))
        torch.library.opcheck(_op, (x, None, 10, None, bound))

    def step(gradient: torch.Tensor, residual: torch.Tensor, bound: torch.Tensor) -> Any:
        indices, values = topk_ef(gradient * 2, residual, 10, out=residual, bound=bound)
        return indices, values + 1

    wanted = [x, y.clone(), torch.zeros(1)]
    results = step(*wanted)
    got = [x, y.clone(), torch.zeros(1)]
    traced = torch.compile(step, fullgraph=True, backend="aot_eager")(*got)
    assert all(map(same_bits, (*traced, *got), (*results, *wanted)))


def test_shapes_are_known_without_data() -> None:
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(10**9)
        indices, values = topk_ef(x, x, 10**7, out=torch.empty(10**9))
    assert indices.shape == values.shape == (10**7,)
    assert indices.dtype == torch.int32 and values.dtype == torch.float32
