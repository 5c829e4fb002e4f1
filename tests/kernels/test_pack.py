"""Elias-Fano codes: C and NumPy agree, size and bits are as documented, and no bytes whatever break `unpack`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from everstep.kernels import pack, packed_size, unpack
from everstep.kernels.pack import (
    _pack,
    _pack_cpu,
    _unpack,
    _unpack_cpu,
    low_bits,
    reference_pack,
    reference_unpack,
)

SIZES = [0, 1, 31, 32, 33, 1023, 100_001, 1_000_000, 2**31 - 1]


def some(n: int, k: int) -> torch.Tensor:
    """Return k ascending distinct places below n."""
    if n <= 1_000_000:
        return torch.randperm(n)[:k].sort().values.int()
    drawn = torch.randint(n, (2 * k + 10,)).unique()
    return drawn[torch.randperm(len(drawn))[:k]].sort().values.int()


@pytest.mark.parametrize("n", SIZES)
def test_packing_and_back(n: int) -> None:
    most = min(n, 1_000_000)
    for k in {0, min(1, n), most // 1000, most // 100, most // 2, most - n // most if n > most else most}:
        indices = some(n, k)
        packed = pack(indices, n)
        assert packed.dtype == torch.uint8 and packed.shape == (packed_size(k, n),)
        assert torch.equal(unpack(packed, k), indices)
        if k <= 100_001:
            assert torch.equal(reference_pack(indices, n), packed)
            assert torch.equal(reference_unpack(packed, k), indices)


@pytest.mark.parametrize("n", [5, 1000, 2**31 - 1])
def test_the_last_places_fit(n: int) -> None:
    for k in (1, 2, 5):
        indices = torch.arange(n - k, n).int()
        assert torch.equal(unpack(pack(indices, n), k), indices)
        assert torch.equal(reference_pack(indices, n), pack(indices, n))


@pytest.mark.parametrize("function", [_pack_cpu, reference_pack])
def test_the_bytes_are_as_documented(function: Any) -> None:
    # n / k = 10: r = 3; low bits 1, 1, 6 -> 0b110_001_001; ones at 0 + 0, 1 + 1, 3 + 2
    assert function(torch.tensor([1, 9, 30], dtype=torch.int32), 31).tolist() == [3, 0b10001001, 0b1, 0b100101]


@pytest.mark.parametrize("density", [0.01, 0.001])
def test_size_is_within_a_tenth_of_the_entropy(density: float) -> None:
    n = 10_000_000
    floor = -density * math.log2(density) - (1 - density) * math.log2(1 - density)
    assert 8 * packed_size(int(n * density), n) <= 1.10 * floor * n


def result(function: Any, packed: torch.Tensor, k: int) -> list[int] | None:
    try:
        return list(function(packed, k).tolist())
    except ValueError as error:
        assert "Elias-Fano" in str(error)
        return None


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 40))
@example(b"", 0)
@example(b"\x00", 1)
@example(b"\x1e" + b"\xff" * 39, 8)
@example(b"\x03\x89\x01\x25", 3)
def test_hostile_bytes_give_indices_or_an_error(code: bytes, k: int) -> None:
    # a copy that ends where a page of its own does not: what C and NumPy say must agree all the same
    packed = torch.from_numpy(np.frombuffer(bytearray(code), np.uint8)) if code else torch.empty(0, dtype=torch.uint8)
    got = result(_unpack_cpu, packed, k)
    assert got == result(reference_unpack, packed, k)
    if got is not None:
        assert len(got) == k and got == sorted(set(got)) and all(0 <= index < 2**31 for index in got)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_byte_gives_indices_or_an_error(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 10_000))
    indices = sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=60)))
    packed = pack(torch.tensor(indices, dtype=torch.int32), n)
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = packed[: data.draw(st.integers(0, len(packed)))].clone()
    for code in (packed, cut):
        assert result(_unpack_cpu, code, len(indices)) == result(reference_unpack, code, len(indices))


@pytest.mark.parametrize("function", [_pack_cpu, reference_pack])
def test_wrong_indices_are_refused(function: Any) -> None:
    for wrong in ([3, 3], [3, 2], [-1, 2], [1, 10]):
        with pytest.raises(ValueError, match=r"ascending, distinct and in \[0, 10\)"):
            function(torch.tensor(wrong, dtype=torch.int32), 10)


def test_wrong_input_is_refused() -> None:
    for error, call in (
        (TypeError, lambda: pack(torch.zeros(1, dtype=torch.int64), 10)),
        (ValueError, lambda: pack(torch.zeros(1, 1, dtype=torch.int32), 10)),
        (ValueError, lambda: pack(torch.zeros(3, dtype=torch.int32), 2)),
        (ValueError, lambda: pack(torch.zeros(3, dtype=torch.int32), 2**31)),
        (TypeError, lambda: unpack(torch.zeros(3, dtype=torch.int8), 2)),
        (ValueError, lambda: unpack(torch.zeros(3, dtype=torch.uint8), -1)),
        (ValueError, lambda: unpack(torch.zeros(3, dtype=torch.uint8), 2**40)),
    ):
        with pytest.raises(error, match="expected"):
            call()


def test_torch_can_trace_them() -> None:
    indices = some(10_000, 100)
    torch.library.opcheck(_pack, (indices, 10_000))
    torch.library.opcheck(_unpack, (pack(indices, 10_000), 100))

    def both(indices: torch.Tensor) -> torch.Tensor:
        return unpack(pack(indices, 10_000), 100) + 1

    assert torch.equal(torch.compile(both, fullgraph=True, backend="aot_eager")(indices), indices + 1)


def test_low_bits_are_the_logarithm_of_the_gap() -> None:
    assert [low_bits(k, 1000) for k in (1, 10, 500, 501, 1000)] == [9, 6, 1, 0, 0]
    assert low_bits(1, 2**31 - 1) == 30
