"""What every compressor promises, whoever wrote it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from everstep.compressors import COMPRESSORS, Compressed, Compressor, RandK, Spec, build_compressor

torch.set_num_threads(1)

METHODS = [name for name in COMPRESSORS if isinstance(build_compressor(name, Spec()), Compressor)]
SIZES = [1, 2, 63, 64, 257, 1000, 4096]


def made(method: str, **spec: float) -> Compressor:
    found = build_compressor(method, Spec(**({"density": 0.1, "seed": 3} | spec)))  # type: ignore[arg-type]
    assert isinstance(found, Compressor)
    return found


def noise(size: int, key: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(key))


def dense(sent: Compressed, size: int) -> torch.Tensor:
    if sent.indices is None:
        return sent.values
    return torch.zeros(size).index_copy_(0, sent.indices.long(), sent.values)


def same(one: Compressed, other: Compressed) -> bool:
    places = one.indices is other.indices is None or torch.equal(one.indices, other.indices)  # type: ignore[arg-type]
    return places and torch.equal(one.values, other.values)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", SIZES)
def test_sent_and_residual_are_the_accumulated_gradient_exactly(method: str, size: int) -> None:
    compressor, residual = made(method), torch.zeros(size)
    for lsn in range(1, 6):
        gradient, before = noise(size, 10 * size + lsn), residual.clone()
        out = torch.full((size,), torch.nan)
        sent = compressor.feed_back(residual, gradient, lsn, out)
        assert sent.finite and torch.equal(residual, before)
        assert torch.equal(out.double() + dense(sent, size).double(), (before + gradient).double())
        residual = out


@pytest.mark.parametrize("method", METHODS)
@given(hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**99), 2.0**99, width=32)))
@settings(max_examples=60, deadline=None)
def test_the_same_for_any_finite_values(method: str, values: np.ndarray) -> None:
    accumulated = torch.tensor(values)
    out = torch.empty_like(accumulated)
    sent = made(method).feed_back(torch.zeros_like(accumulated), accumulated, 1, out)
    assert torch.equal(out.double() + dense(sent, accumulated.numel()).double(), accumulated.double())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", SIZES)
def test_what_is_read_is_what_was_sent_and_messages_have_one_size(method: str, size: int) -> None:
    lengths = set()
    for lsn in (1, 2):
        sender, receiver = made(method), made(method)
        sent = sender.compress(noise(size, lsn) * 10.0**lsn, lsn)
        message = sender.message(sent, size)
        assert message.dtype == torch.uint8 and same(receiver.read(message, size, lsn), sent)
        lengths.add(message.numel())
    lengths.add(sender.message(sender.compress(torch.zeros(size), 3), size).numel())
    assert len(lengths) == 1


@pytest.mark.parametrize("method", METHODS)
def test_the_past_of_a_compressor_changes_nothing(method: str) -> None:
    used, fresh, gradient = made(method), made(method), noise(1000, 7)
    for lsn in range(1, 4):
        used.compress(noise(1000, lsn) * 1000, lsn)
    assert same(used.compress(gradient, 4), fresh.compress(gradient, 4))
    out = [torch.empty(1000), torch.empty(1000)]
    one = used.feed_back(gradient, gradient, 5, out[0])
    assert same(one, fresh.feed_back(gradient, gradient, 5, out[1])) and torch.equal(*out)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_gradient_that_is_not_finite_is_told(method: str, wrong: float) -> None:
    gradient = noise(1000, 1)
    gradient[500] = wrong
    assert not made(method).compress(gradient, 1).finite
    assert not made(method).feed_back(torch.zeros(1000), gradient, 1, torch.empty(1000)).finite


@pytest.mark.parametrize("method", METHODS)
def test_codes_stand_for_the_values(method: str) -> None:
    sent = made(method).compress(noise(1000, 1), 1)
    assert (sent.codes is not None) == ("int" in method)
    if sent.codes is not None:
        assert torch.equal(sent.codes.values(sent.values.numel()), sent.values)


@pytest.mark.parametrize(
    ("method", "bytes_each"), [("int8", 1.016), ("int4", 0.5625), ("topk", 0.46), ("randk", 0.4), ("topk+int8", 0.165)]
)
def test_how_much_travels(method: str, bytes_each: float) -> None:
    compressor = made(method)
    message = compressor.message(compressor.compress(noise(100_000, 1), 1), 100_000)
    assert message.numel() / 100_000 == pytest.approx(bytes_each, rel=0.03)


# --- random-k


def test_all_draw_the_same_and_every_step_another() -> None:
    one, other = made("randk"), made("randk")
    drawn = [one.compress(noise(1000, 1), lsn).indices for lsn in (1, 2)]
    again = other.compress(noise(1000, 2), 1).indices
    assert drawn[0] is not None and drawn[1] is not None and again is not None
    assert torch.equal(drawn[0], again) and not torch.equal(drawn[0], drawn[1])
    assert drawn[0].numel() == 100 and (drawn[0].diff() > 0).all() and 0 <= int(drawn[0][0]) <= int(drawn[0][-1]) < 1000


def test_every_element_is_equally_likely() -> None:
    size, steps = 103, 6000
    compressor, counts = made("randk", density=10 / 103), np.zeros(size)
    for lsn in range(steps):
        counts[compressor.compress(torch.ones(size), lsn).indices.numpy()] += 1  # type: ignore[union-attr]
    expected = steps * 10 / size
    assert counts.sum() == 10 * steps
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)  # binomial; 6 sigma


def test_without_feedback_random_k_is_unbiased() -> None:
    compressor = RandK(Spec(0.25, 3, feedback=False))
    gradient = noise(400, 5)
    mean = sum(dense(compressor.compress(gradient, lsn), 400) for lsn in range(3000)) / 3000
    assert torch.allclose(mean, gradient, atol=6 * 2 * 3.5 / np.sqrt(3000))
