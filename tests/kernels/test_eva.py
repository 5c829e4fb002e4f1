"""Eva's preconditioning against float64, within a bound that follows from the lengths of its sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from everstep.kernels import eva as module
from tests.kernels.shim import ShimLauncher

U = 2.0**-24  # half the distance of floats at 1
DAMPING = 0.03
SHAPES = [(1, 1), (3, 5), (8, 4), (64, 64), (10, 256), (257, 28), (33, 1023), (2, 20000), (1, 17), (700, 1)]

Layers = tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]


def layers(shapes: list[tuple[int, int]], scale: float = 1.0) -> Layers:
    torch.manual_seed(0)
    return (
        [torch.randn(shape) for shape in shapes],
        [scale * torch.randn(n) for _, n in shapes],
        [scale * torch.randn(m) for m, _ in shapes],
    )


def bound(G: torch.Tensor, a: torch.Tensor, b: torch.Tensor, depth: int) -> torch.Tensor:
    """How far each element may be off: the dot is a sum in `depth` roundings, the rest is a few roundings."""
    G, a, b = G.double().abs(), a.double().abs(), b.double().abs()
    off = depth * U * (b @ G @ a) / (DAMPING + (a @ a) * (b @ b))
    c = (b @ G @ a) / (DAMPING + (a @ a) * (b @ b))
    return (off * torch.outer(b, a) + 6 * U * (G + c * torch.outer(b, a))) / DAMPING


def check(run: Callable[..., None], given: Layers, depths: list[int]) -> None:
    before = [G.clone() for G in given[0]]
    run(*given, DAMPING)
    for G, was, a, b, depth in zip(given[0], before, *given[1:], depths, strict=True):
        off = (G.double() - module.reference(was, a, b, DAMPING)).abs()
        assert (off <= bound(was, a, b, depth)).all(), (tuple(G.shape), off.max())


@pytest.mark.parametrize("scale", [1.0, 1e-4, 30.0])
def test_it_is_the_formula(scale: float) -> None:
    given = layers(SHAPES, scale)
    check(module.eva, given, [n + 4 for _, n in SHAPES])  # a row is summed in any order, the products exactly


@pytest.mark.asan
def test_the_kernels_compute_the_formula(shim: ShimLauncher) -> None:
    given = layers(SHAPES)
    given[1][3] = torch.randn(65)[1:]  # 64 elements that do not begin on 16 bytes
    check(module._cuda, given, [4 * 16 + 4 + 13] * len(SHAPES))  # a thread's own sum, products, the tree of the block
    assert shim.launched == ["eva_dot", "eva_coefficient", "eva_apply"]


def test_the_kernels_give_the_same_bits_alone_and_in_any_order(shim: ShimLauncher) -> None:
    given = layers(SHAPES)
    module._cuda(*given, DAMPING)
    for alone, G in enumerate(given[0]):
        again = layers(SHAPES)
        module._cuda(*(column[alone : alone + 1] for column in again), DAMPING)
        assert torch.equal(again[0][alone], G)
    shim.seed += 7
    again = layers(SHAPES)
    module._cuda(*again, DAMPING)
    assert all(map(torch.equal, again[0], given[0]))


def test_it_is_the_inverse_of_the_damped_curvature() -> None:
    """The dense twin: (v v^T + damping I)^-1 vec(G), v = vec(b a^T)."""
    G, a, b = torch.randn(5, 7).double(), torch.randn(7).double(), torch.randn(5).double()
    v = torch.outer(b, a).flatten()
    dense = torch.linalg.solve(torch.outer(v, v) + DAMPING * torch.eye(35).double(), G.flatten()).view(5, 7)
    assert torch.allclose(module.reference(G, a, b, DAMPING), dense, rtol=1e-10, atol=1e-10)


def test_the_cpu_path_has_the_same_bits_with_any_number_of_threads() -> None:
    shapes, results = [(700, 300), (1, 100_000), (100_000, 1)], []
    for threads in [1, 2]:
        torch.set_num_threads(threads)
        given = layers(shapes)
        module.eva(*given, DAMPING)
        results.append(given[0])
    assert all(map(torch.equal, *results))


def test_nothing_to_do_is_done(shim: ShimLauncher) -> None:
    for shape in [(0, 3), (3, 0)]:
        empty = layers([shape, (2, 2)])
        module._cuda(*empty, DAMPING)
        module.eva(*empty, DAMPING)
    module.eva([], [], [], DAMPING)


def test_a_matrix_that_is_not_finite_leaves_the_others_alone(shim: ShimLauncher) -> None:
    for run in [module.eva, module._cuda]:
        given, clean = layers([(4, 4), (6, 8)]), layers([(4, 4), (6, 8)])
        given[0][0][1, 1] = torch.nan
        run(*given, DAMPING)
        run(*clean, DAMPING)
        assert given[0][0].isnan().all() and torch.equal(given[0][1], clean[0][1])


def test_it_is_an_operator_as_torch_wants_it() -> None:
    gradients, a, b = layers([(3, 4), (5, 2)])
    torch.library.opcheck(module._eva, (gradients, a, b, DAMPING))

    def step(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        module.eva(gradients, a, b, DAMPING)
        return [G * 2 for G in gradients]

    want = [2 * module.reference(G, *vectors, DAMPING) for G, *vectors in zip(gradients, a, b, strict=True)]
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(gradients)
    assert all(torch.allclose(g.double(), w, rtol=1e-4) for g, w in zip(got, want, strict=True))
    assert torch.equal(got[0], gradients[0] * 2)


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        (lambda G, a, b: (G[:1], a, b, 1.0), ValueError, "got 1, 2 and 2"),
        (lambda G, a, b: (G, b, a, 1.0), ValueError, r"layer 0: .* got \(3, 4\), \(3,\) and \(4,\)"),
        (lambda G, a, b: (G, a, b, 0.0), ValueError, "above zero, got 0.0"),
        (lambda G, a, b: (G, a, b, float("nan")), ValueError, "above zero, got nan"),
        (lambda G, a, b: ([G[0].double(), G[1]], a, b, 1.0), TypeError, "float32 is wanted, got torch.float64"),
        (lambda G, a, b: ([G[0].T.contiguous().T, G[1]], a, b, 1.0), ValueError, "contiguous"),
        (lambda G, a, b: ([G[0][0], G[1]], a, b, 1.0), ValueError, r"layer 0: .* got \(4,\)"),
    ],
)
def test_what_does_not_fit_is_refused(
    change: Callable[..., tuple[object, ...]], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        module.eva(*change(*layers([(3, 4), (5, 2)])))  # type: ignore[arg-type]
