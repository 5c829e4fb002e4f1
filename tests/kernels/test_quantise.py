"""Blocks of int8 and int4: C and plain torch agree to the bit, and what rounding loses is exact."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from everstep.kernels import BLOCK, dequantise, quantise
from everstep.kernels.quantise import (
    _dequantise,
    _dequantise_cpu,
    _quantise,
    _quantise_cpu,
    reference_dequantise,
    reference_quantise,
)
from tests.kernels.bits import same_bits

SIZES = [0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1023, 100_001, 1_000_000]
LEVELS = {8: 127, 4: 7}


def odd(n: int) -> torch.Tensor:
    x = torch.randn(n)
    x[n // 2 :: 700] = torch.nan
    x[n // 3 :: 900] = -torch.inf
    return x


INPUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": torch.randn,
    "all ranges": lambda n: torch.randn(n) * 10 ** (torch.rand(n) * 76 - 38),
    "subnormal": lambda n: torch.randn(n) * 1e-42,
    "scale 0": lambda n: torch.randn(n) * 1e-44,
    "zero": lambda n: -torch.zeros(n),
    "largest": lambda n: torch.randn(n).sign() * torch.finfo(torch.float32).max,
    "halves": lambda n: torch.randint(-14, 15, (n,)) / 2,  # with 4 bits and the scale 1: rounded to even
    "not finite": odd,
}


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS.keys())
@pytest.mark.parametrize("bits", [8, 4])
def test_c_and_torch_agree(bits: int, make: Callable[[int], torch.Tensor]) -> None:
    for n in SIZES if make is torch.randn else SIZES[:-1]:
        values = make(n)
        codes, scales = _quantise_cpu(values, bits)
        wanted = reference_quantise(values, bits)
        assert same_bits(codes, wanted[0]) and same_bits(scales, wanted[1])
        read = _dequantise_cpu(codes, scales, n, bits)
        assert same_bits(read, reference_dequantise(codes, scales, n, bits))
        assert codes.shape == ((n,) if bits == 8 else ((n + 1) // 2,)) and scales.shape == (-(-n // BLOCK[bits]),)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([8, 4]))
def test_what_rounding_loses_is_exact(data: st.DataObject, bits: int) -> None:
    size = st.floats(width=32, allow_nan=False, allow_infinity=False)
    with np.errstate(all="ignore"):
        values = torch.from_numpy(data.draw(hnp.arrays(np.float32, st.integers(0, 300), elements=size)))
    n = len(values)
    read = dequantise(*quantise(values, bits), n, bits)
    lost = values - read
    assert torch.equal(lost.double(), values.double() - read.double())
    assert torch.equal(read + lost, values)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_error_is_half_a_step(bits: int) -> None:
    values = torch.randn(10_000)
    lost = (values - dequantise(*quantise(values, bits), 10_000, bits)).abs()
    scales = quantise(values, bits)[1].repeat_interleave(BLOCK[bits])[:10_000]
    assert (lost <= scales * 0.500001).all() and (lost > scales * 0.49).any()


@pytest.mark.parametrize("quantised", [_quantise_cpu, reference_quantise])
def test_the_codes_are_as_documented(quantised: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    codes, scales = quantised(torch.tensor([7.0, -7.0, 0.5, 1.5, -2.5]), 4)
    assert codes.tolist() == [0x1F, 0xA8, 0x86] and scales.tolist() == [1.0]  # an odd number: the last half is 8
    codes, scales = quantised(torch.tensor([0.0, -127.0, 2.5, 3.5]), 8)
    assert codes.tolist() == [0, -127, 2, 4] and scales.tolist() == [1.0]


@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_that_is_not_finite_reads_as_nan(bits: int) -> None:
    block = BLOCK[bits]
    for bad in (torch.nan, torch.inf, -torch.inf):
        values = torch.randn(3 * block)
        values[block + 5] = bad
        codes, scales = quantise(values, bits)
        read = dequantise(codes, scales, 3 * block, bits).view(3, block)
        assert scales.isnan().tolist() == [False, True, False]
        assert read[1].isnan().all() and read[::2].isfinite().all()
        assert not (codes if bits == 8 else codes ^ 0x88).view(3, -1)[1].any()


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_stay_within_their_range(bits: int) -> None:
    codes, _ = quantise(torch.full((64,), 190e-45), bits)  # a scale rounded down by a third
    read = codes if bits == 8 else (codes & 15).to(torch.int8) - 8
    assert (read == LEVELS[bits]).all()


def test_wrong_input_is_refused() -> None:
    codes, scales = quantise(torch.randn(300))
    for error, call in (
        (ValueError, lambda: quantise(torch.randn(4), 2)),
        (ValueError, lambda: quantise(torch.randn(2, 2))),
        (ValueError, lambda: quantise(torch.randn(4)[::2])),
        (TypeError, lambda: quantise(torch.randn(4).double())),
        (ValueError, lambda: dequantise(codes, scales, 301)),
        (ValueError, lambda: dequantise(codes, scales[:1], 300)),
        (ValueError, lambda: dequantise(codes, scales, 300, 16)),
        (TypeError, lambda: dequantise(codes, scales, 300, 4)),
        (TypeError, lambda: dequantise(codes, scales.double(), 300)),
    ):
        with pytest.raises(error, match="expected"):
            call()


@pytest.mark.parametrize("bits", [8, 4])
def test_torch_can_trace_them(bits: int) -> None:
    values = torch.randn(1001)
    torch.library.opcheck(_quantise, (values, bits))
    torch.library.opcheck(_dequantise, (*quantise(values, bits), 1001, bits))

    def both(values: torch.Tensor) -> torch.Tensor:
        codes, scales = quantise(values * 2, bits)
        return values * 2 - dequantise(codes, scales, 1001, bits)

    assert same_bits(torch.compile(both, fullgraph=True, backend="aot_eager")(values), both(values))
