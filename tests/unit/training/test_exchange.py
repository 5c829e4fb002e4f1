"""The exchange against naive transcriptions, residual policy by residual policy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from everstep import kernels
from everstep.compressors import Spec, TopK, build_compressor
from everstep.core.errors import GroupBroken
from everstep.training.exchange import Exchange, Reduced, Tail, used_flags
from everstep.training.layout import plan_layout
from tests.unit.training.worlds import ThreadGroup, in_threads, same, solo, together

SIZES = [30, 50, 20]
SIZE = sum(SIZES)
LAYOUT = plan_layout(["a", "b", "c"], [torch.empty(n) for n in SIZES], [0, 0, 0], 2)
NAMES = Tail(slots=3, buffers=2, shards=3)
DENSITY = 0.1


def exchange_of(policy: str, method: str = "topk", density: float = DENSITY, window: int = 2) -> Exchange:
    return Exchange(
        LAYOUT,
        NAMES,
        build_compressor(method, Spec(density, feedback=policy != "none")),
        policy,
        window,
        torch.device("cpu"),
    )


def gradient_of(step: int, rank: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank))


def fill(exchange: Exchange, gradient: Tensor, **tail: float) -> Tensor:
    wire = exchange.next_buffer()
    wire[:SIZE] = gradient
    wire[SIZE:] = 0
    for name, value in tail.items():
        wire[SIZE:][getattr(NAMES, name)] = value
    return wire


def stage(exchanges: list[Exchange], gradients: list[Tensor], lsn: int = 1, **tail: float) -> list[Reduced]:
    def job(group: ThreadGroup) -> Reduced:
        exchange = exchanges[group.world_rank]
        return exchange.stage(fill(exchange, gradients[group.world_rank], **tail), group, lsn)

    return together(len(exchanges), job)


def largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the largest magnitudes, the lowest index first among equals, ascending."""
    order = sorted(range(len(values)), key=lambda at: (-abs(values[at]), at))
    return np.array(sorted(order[:count]), np.int64)


def dense_of(reduced: Reduced) -> np.ndarray:
    out = np.zeros(SIZE, np.float32)
    out[reduced.indices.numpy()] = reduced.values.numpy()  # type: ignore[union-attr]
    return out


# --- the tail


def test_the_tail_names_every_place_once() -> None:
    places = [*range(NAMES.size)]
    named = [*places[NAMES.used], *places[NAMES.changed], *places[NAMES.lag], NAMES.loss, NAMES.broken, NAMES.stop]
    assert named == places


@pytest.mark.parametrize("policy", ["replicated", "survivor", "none"])
def test_the_tail_is_summed_over_workers_by_every_policy(policy: str) -> None:
    exchanges = [exchange_of(policy) for _ in range(2)]
    results = stage(exchanges, [gradient_of(1, 0), gradient_of(1, 1)], loss=0.25, stop=1.0, used=1.0)
    for reduced in results:
        assert float(reduced.tail[NAMES.loss]) == 0.5 and float(reduced.tail[NAMES.stop]) == 2
        assert used_flags(reduced.tail, NAMES).tolist() == [True, True, True]
        assert float(reduced.tail[NAMES.broken]) == 0 and reduced.finite


# --- without compression


def test_a_dense_exchange_is_the_sum_and_needs_no_residual() -> None:
    exchanges = [exchange_of("replicated", "none") for _ in range(2)]
    gradients = [gradient_of(1, 0), gradient_of(1, 1)]
    one, other = stage(exchanges, gradients)
    assert same(one.values, other.values) and same(one.values, gradients[0] + gradients[1])
    assert one.indices is None and one.residual is None and exchanges[0].residual is None
    assert one.network_bytes == 2 * (SIZE + NAMES.size) * 4
    exchanges[0].adopt(1, torch.ones(SIZE))
    assert exchanges[0].residual is None


def test_dense_buffers_are_not_used_again_while_a_sender_may_read_them() -> None:
    exchange = exchange_of("none", "none", window=2)
    places = [exchange.next_buffer().data_ptr() for _ in range(5)]
    assert len(set(places)) == 5
    assert exchange.next_buffer().data_ptr() == places[0]
    old = exchange.next_buffer()
    old.fill_(7)
    exchange.renew()
    assert {exchange.next_buffer().data_ptr() for _ in range(5)}.isdisjoint({old.data_ptr()})
    assert float(old.sum()) == 7 * old.numel()


# --- replicated


def test_replicated_is_the_naive_error_feedback_on_the_summed_gradient() -> None:
    exchanges = [exchange_of("replicated") for _ in range(2)]
    residual = np.zeros(SIZE, np.float32)
    for lsn in range(1, 7):
        gradients = [gradient_of(lsn, 0), gradient_of(lsn, 1)]
        residual += (gradients[0] + gradients[1]).numpy()
        accumulated = residual.copy()
        indices = largest(residual, 10)
        values = residual[indices].copy()
        residual[indices] = 0
        for exchange, reduced in zip(exchanges, stage(exchanges, gradients, lsn), strict=True):
            assert reduced.indices is not None and reduced.indices.tolist() == indices.tolist()
            assert reduced.values.numpy().tobytes() == values.tobytes()
            assert reduced.residual is not None
            assert (dense_of(reduced) + reduced.residual.numpy()).tobytes() == accumulated.tobytes()
            exchange.commit(reduced)
            assert exchange.residual is not None and exchange.residual.numpy().tobytes() == residual.tobytes()


def test_staging_changes_nothing_and_may_be_repeated() -> None:
    for policy in ("replicated", "survivor"):
        exchange = exchange_of(policy)
        exchange.commit(exchange.stage(fill(exchange, gradient_of(1, 0)), solo(), 1))
        before = exchange.residual.clone()  # type: ignore[union-attr]
        once = exchange.stage(fill(exchange, gradient_of(2, 0)), solo(), 2)
        kept = [once.values.clone(), once.indices.clone(), once.residual.clone()]  # type: ignore[union-attr]
        assert same(exchange.residual, before)
        exchange.stage(fill(exchange, gradient_of(9, 0)), solo(), 2)
        again = exchange.stage(fill(exchange, gradient_of(2, 0)), solo(), 2)
        assert same(kept, [again.values, again.indices, again.residual])
        exchange.commit(again)
        assert same(exchange.residual, kept[2])


# --- survivor


@pytest.mark.parametrize("size", [1, 2, 3])
def test_survivor_is_the_naive_error_feedback_of_each_worker(size: int) -> None:
    exchanges = [exchange_of("survivor") for _ in range(size)]
    residuals = [np.zeros(SIZE, np.float32) for _ in range(size)]
    for lsn in range(1, 6):
        gradients = [gradient_of(lsn, rank) for rank in range(size)]
        total, named, accumulated = np.zeros(SIZE, np.float32), set(), []
        for rank in range(size):
            residuals[rank] += gradients[rank].numpy()
            accumulated.append(residuals[rank].copy())
            indices = largest(residuals[rank], 10)
            total[indices] += residuals[rank][indices]
            residuals[rank][indices] = 0
            named |= set(indices.tolist())
        results = stage(exchanges, gradients, lsn)
        for rank, reduced in enumerate(results):
            assert reduced.indices is not None and reduced.indices.tolist() == sorted(named)
            assert reduced.values.numpy().tobytes() == total[sorted(named)].tobytes()
            exchanges[rank].commit(reduced)
            assert exchanges[rank].residual.numpy().tobytes() == residuals[rank].tobytes()  # type: ignore[union-attr]
            message = 4 * NAMES.size + 4 * 10 + kernels.packed_size(10, SIZE)
            assert reduced.network_bytes == size * (size - 1) * message
        left = np.sum(accumulated, axis=0) - np.sum(residuals, axis=0)
        np.testing.assert_allclose(dense_of(results[0]), left, rtol=1e-5, atol=1e-6)


def test_without_residual_what_is_not_sent_is_gone() -> None:
    exchanges = [exchange_of("none") for _ in range(2)]
    for lsn in (1, 2):
        gradients = [gradient_of(lsn, 0), gradient_of(lsn, 1)]
        total = np.zeros(SIZE, np.float32)
        for gradient in gradients:
            indices = largest(gradient.numpy(), 10)
            total[indices] += gradient.numpy()[indices]
        for exchange, reduced in zip(exchanges, stage(exchanges, gradients, lsn), strict=True):
            assert dense_of(reduced).tobytes() == total.tobytes() and reduced.residual is None
            exchange.commit(reduced)
            assert exchange.residual is None


def test_indices_travel_unharmed_whatever_they_look_like_as_floats() -> None:
    size = 1 << 12
    layout = plan_layout(["a"], [torch.empty(size)], [0], 1)
    names = Tail(1, 0, 2)
    exchange = Exchange(layout, names, TopK(Spec(1.0)), "none", 2, torch.device("cpu"))
    wire = exchange.next_buffer()
    wire[:size] = torch.arange(size) - 5.0
    reduced = exchange.stage(wire, solo(), 1)
    assert reduced.indices is not None and reduced.indices.tolist() == list(range(size))
    assert reduced.values.tolist() == [at - 5.0 for at in range(size)]


def test_the_same_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real process groups of two members in two threads give the bits of the group of threads."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()

    class Gloo:
        def __init__(self, name: str, rank: int) -> None:
            self.world_rank, self.world_size = rank, 2
            self.group: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2)

        def all_reduce(self, tensor: Tensor) -> None:
            self.group.allreduce([tensor]).wait()

        def all_gather(self, tensor: Tensor) -> list[Tensor]:
            parts = [torch.empty_like(tensor) for _ in range(2)]
            self.group.allgather([parts], [tensor]).wait()
            return parts

    for policy in ("replicated", "survivor", "none"):
        real, threads = ([exchange_of(policy) for _ in range(2)] for _ in range(2))

        def job(rank: int, real: list[Exchange] = real, policy: str = policy) -> list[Reduced]:
            group, out = Gloo(policy, rank), []
            for lsn in (1, 2, 3):
                reduced = real[rank].stage(fill(real[rank], gradient_of(lsn, rank), loss=0.5), group, lsn)
                real[rank].commit(reduced)
                out.append(reduced)
            return out

        outs = in_threads([lambda rank=rank, job=job: job(rank) for rank in range(2)])  # type: ignore[misc]
        for lsn in (1, 2, 3):
            wanted = stage(threads, [gradient_of(lsn, 0), gradient_of(lsn, 1)], lsn, loss=0.5)
            for rank in range(2):
                threads[rank].commit(wanted[rank])
                got = outs[rank][lsn - 1]
                assert same([got.values, got.indices, got.tail], [wanted[0].values, wanted[0].indices, wanted[0].tail])
        assert same([e.residual for e in real], [e.residual for e in threads])


# --- values that are not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("policy", ["dense", "replicated", "survivor", "none"])
def test_everybody_learns_of_a_value_that_is_not_finite(policy: str, bad: float) -> None:
    exchanges = [exchange_of("replicated", "none") if policy == "dense" else exchange_of(policy) for _ in range(2)]
    for exchange, reduced in zip(exchanges, stage(exchanges, [gradient_of(1, 0), gradient_of(1, 1)], 1), strict=True):
        exchange.commit(reduced)
    before = [None if e.residual is None else e.residual.clone() for e in exchanges]
    wrong = gradient_of(2, 1)
    wrong[17] = bad
    results = stage(exchanges, [gradient_of(2, 0), wrong], 2)
    assert [reduced.finite for reduced in results] == [False, False]
    assert same([e.residual for e in exchanges], before)
    again = stage(exchanges, [gradient_of(2, 0), gradient_of(2, 1)], 2)
    assert all(reduced.finite for reduced in again)


def test_large_finite_values_whose_sum_overflows_are_finite() -> None:
    exchange = exchange_of("replicated", "none")
    assert exchange.stage(fill(exchange, torch.full((SIZE,), 3e38)), solo(), 1).finite


@pytest.mark.parametrize("policy", ["dense", "replicated", "survivor", "none"])
def test_a_sum_that_is_not_finite_is_told_too(policy: str) -> None:
    exchanges = [exchange_of("replicated", "none") if policy == "dense" else exchange_of(policy) for _ in range(2)]
    huge = torch.zeros(SIZE)
    huge[5] = 3e38
    for reduced in stage(exchanges, [huge, huge], 1):
        assert not reduced.finite


@pytest.mark.parametrize("policy", ["replicated", "survivor"])
def test_a_residual_that_overflows_is_told_too(policy: str) -> None:
    exchange = exchange_of(policy)
    exchange.adopt(0, torch.full((SIZE,), 3e38))
    reduced = exchange.stage(fill(exchange, torch.full((SIZE,), 3e38)), solo(), 1)
    assert not reduced.finite and bool(torch.isfinite(reduced.values).all())  # what is not finite is never sent


# --- broken groups, and residuals that come from elsewhere


@pytest.mark.parametrize("policy", ["replicated", "survivor", "none"])
def test_a_broken_group_leaves_the_residual(policy: str) -> None:
    exchange = exchange_of(policy)
    exchange.commit(exchange.stage(fill(exchange, gradient_of(1, 0)), solo(), 1))
    before = None if exchange.residual is None else exchange.residual.clone()
    with pytest.raises(GroupBroken):
        exchange.stage(fill(exchange, gradient_of(2, 0)), solo(break_at=1), 2)
    assert same(exchange.residual, before)


def test_a_replicated_residual_is_the_givers() -> None:
    exchange, given = exchange_of("replicated"), torch.arange(SIZE, dtype=torch.float32)
    exchange.adopt(5, given)
    assert same(exchange.residual, given)
    exchange.commit(exchange.stage(fill(exchange, gradient_of(1, 0)), solo(), 6))
    assert given.tolist() == list(range(SIZE))


def test_a_survivor_that_missed_only_the_commit_keeps_its_own_staged_residual() -> None:
    exchange = exchange_of("survivor")
    exchange.commit(exchange.stage(fill(exchange, gradient_of(1, 0)), solo(), 1))
    with pytest.raises(GroupBroken):  # a peer may have got our part all the same
        exchange.stage(fill(exchange, gradient_of(2, 0)), solo(break_at=1), 2)
    twin = exchange_of("survivor")
    for lsn in (1, 2):
        twin.commit(twin.stage(fill(twin, gradient_of(lsn, 0)), solo(), lsn))
    exchange.adopt(2, None)
    assert same(exchange.residual, twin.residual)
    for each in (exchange, twin):
        each.commit(each.stage(fill(each, gradient_of(3, 0)), solo(), 3))
    assert same(exchange.residual, twin.residual)


@pytest.mark.parametrize("lsn", [1, 3])
def test_a_survivor_that_did_not_contribute_to_the_step_starts_at_zero(lsn: int) -> None:
    exchange = exchange_of("survivor")
    exchange.stage(fill(exchange, gradient_of(2, 0)), solo(), 2)
    exchange.adopt(lsn, None)
    assert exchange.residual is not None and not exchange.residual.any()
    exchange.adopt(2, None)  # used up
    assert not exchange.residual.any()


def test_a_finished_step_leaves_nothing_pending() -> None:
    exchange = exchange_of("survivor")
    exchange.commit(exchange.stage(fill(exchange, gradient_of(1, 0)), solo(), 1))
    exchange.adopt(1, None)
    assert exchange.residual is not None and not exchange.residual.any()


def test_a_preloaded_residual_waits_for_the_state_of_its_step() -> None:
    own = torch.arange(SIZE, dtype=torch.float32)
    exchange = exchange_of("survivor")
    exchange.preload(7, own.clone())
    assert exchange.residual is not None and not exchange.residual.any()
    exchange.adopt(7, None)
    assert same(exchange.residual, own)
    other = exchange_of("survivor")
    other.preload(7, own.clone())
    other.adopt(8, None)
    assert other.residual is not None and not other.residual.any()
    for each in (exchange, other):
        each.commit(each.stage(fill(each, gradient_of(8, 0)), solo(), 8))
    assert not same(exchange.residual, other.residual)


def test_a_survivors_residual_stays_if_the_step_it_missed_was_left_out() -> None:
    """A peer's gradient was not finite, so nobody applied what we sent; then we take the peer's state of that step."""
    exchanges = [exchange_of("survivor") for _ in range(2)]
    first = [gradient_of(1, 0), gradient_of(1, 1)]
    for exchange, reduced in zip(exchanges, stage(exchanges, first, 1), strict=True):
        exchange.commit(reduced)
    before = exchanges[0].residual.clone()  # type: ignore[union-attr]
    wrong = torch.full((SIZE,), math.nan)
    results = stage(exchanges, [gradient_of(2, 0), wrong], 2)
    assert not results[0].finite  # not committed
    exchanges[0].adopt(2, None)
    kept = exchanges[0].residual
    assert same(kept, before)
