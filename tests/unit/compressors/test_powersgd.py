"""PowerSGD against a naive transcription of its algorithm, and what it promises besides."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from everstep.compressors import Compressed, PowerSGD, Spec

torch.set_num_threads(1)

SHAPES = ((12, 9), (7,), (), (3, 5, 4), (2, 2))
SIZE = sum(math.prod(shape) for shape in SHAPES)
RANK = 2


def noise(key: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(key))


def reduced(gradients: list[torch.Tensor], lsn: int = 1) -> list[tuple[Compressed, torch.Tensor]]:
    """Every worker's answer, in threads that meet at each collective."""
    barrier, brought = threading.Barrier(len(gradients), timeout=20), [torch.empty(0)] * len(gradients)
    out: list[tuple[Compressed, torch.Tensor]] = [None] * len(gradients)  # type: ignore[list-item]

    def worker(rank: int) -> None:
        def all_reduce(tensor: torch.Tensor) -> None:
            brought[rank] = tensor.clone()
            barrier.wait()
            total = sum(brought[1:], brought[0].clone())
            barrier.wait()
            tensor.copy_(total)

        power = PowerSGD(Spec(rank=RANK, shapes=SHAPES))
        out[rank] = power.reduce(gradients[rank], lsn, all_reduce, first=rank == 0)

    threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(len(gradients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def test_only_matrices_that_shrink_are_made_thin() -> None:
    found = PowerSGD(Spec(rank=RANK, shapes=SHAPES)).matrices
    assert [(m.start, m.rows, m.columns) for m in found] == [(0, 12, 9), (116, 3, 20)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_as_the_algorithm_says(size: int) -> None:
    gradients = [noise(rank) for rank in range(size)]
    power = PowerSGD(Spec(rank=RANK, shapes=SHAPES))
    total = torch.stack(gradients).sum(0).double()
    answers = reduced(gradients)
    for sent, _ in answers:
        assert torch.equal(sent.values, answers[0][0].values) and sent.indices is None and sent.finite
    expected = total.clone()
    for matrix in power.matrices:
        whole = matrix.of(total)
        left = torch.linalg.qr(whole @ power.start(matrix, 1).double()).Q
        matrix.of(expected).copy_(left @ (left.T @ whole))
    assert torch.allclose(answers[0][0].values.double(), expected, atol=1e-5)


def test_parts_add_up_to_what_is_sent() -> None:
    answers = reduced([noise(1), noise(2), noise(3)])
    parts = torch.stack([mine for _, mine in answers]).sum(0)
    assert torch.allclose(parts, answers[0][0].values, atol=1e-5)


def test_a_matrix_of_that_rank_is_sent_whole() -> None:
    gradient = torch.zeros(SIZE)
    gradient[:108] = (noise(1)[:12, None] @ noise(2)[None, :9]).reshape(-1)
    (sent, mine), *_ = reduced([gradient])
    assert torch.allclose(sent.values, gradient, atol=1e-5) and torch.allclose(mine, gradient, atol=1e-5)


def test_with_error_feedback_everything_gets_through() -> None:
    """The mean of what is sent comes to the gradient as 1/T: the residual stays bounded."""
    gradient, residual, total = noise(5), torch.zeros(SIZE), torch.zeros(SIZE)
    power, nothing = PowerSGD(Spec(rank=RANK, shapes=SHAPES)), (lambda tensor: None)
    sizes = []
    for lsn in range(1, 201):
        accumulated = residual + gradient
        sent, mine = power.reduce(accumulated, lsn, nothing, first=True)
        total += sent.values
        residual = accumulated - mine
        sizes.append(float(residual.norm()))
    assert max(sizes[100:]) < 1.5 * max(sizes[:100])
    assert torch.allclose(total / 200, gradient, atol=0.2 * float(gradient.abs().max()))


def test_less_travels() -> None:
    sent: list[int] = []
    spec = Spec(rank=2, shapes=((256, 256), (10,)))
    PowerSGD(spec).reduce(torch.randn(256 * 256 + 10), 1, lambda tensor: sent.append(tensor.numel()), first=True)
    assert sum(sent) == 3 * 2 * 256 + 10
