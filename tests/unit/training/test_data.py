from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from everstep.core.errors import SettingsError, TaskError
from everstep.core.rng import fold
from everstep.training.data import BatchLoader, Order, batches_upto, data_epoch, sample_ids
from everstep.training.seeding import seed_all, step_seed

torch.set_num_threads(1)


class Noisy(Dataset[Any]):
    """Item i: i itself, and a draw of each global generator, as augmentation would make."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return index, torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])


class Refusing(Noisy):
    def __getitem__(self, index: int) -> Any:
        raise KeyError(f"sample {index} is broken")


def masking(samples: list[Any]) -> Any:
    """A collate that draws."""
    return [index for index, _ in samples], torch.rand(len(samples))


def flat(batch: Any) -> bytes:
    ids, draws = batch
    return np.asarray(ids).tobytes() + draws.numpy().tobytes()


def loader(size: int = 10, **changed: Any) -> BatchLoader:
    options: dict[str, Any] = {"seed": 3, "global_size": 8, "micro_shards": 4} | changed
    return BatchLoader(Noisy(size), **options)


def ids_of(batches: list[Any]) -> list[int]:
    return [int(i) for ids, _ in batches for i in ids]


# --- the order


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 99), st.integers(1, 40), st.integers(0, 200), st.integers(0, 90))
def test_any_stretch_is_a_part_of_the_whole(seed: int, size: int, start: int, count: int) -> None:
    whole = sample_ids(seed, size, 0, start + count)
    assert sample_ids(seed, size, start, count) == whole[start:]
    for epoch in range(data_epoch(len(whole), size)):
        assert sorted(whole[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_the_order_depends_on_seed_and_data_epoch() -> None:
    first, second = (sample_ids(0, 50, epoch * 50, 50) for epoch in range(2))
    assert first != second and first != sample_ids(1, 50, 0, 50)


def test_the_order_is_pinned() -> None:
    """A run of an earlier version must go on with the same samples."""
    assert sample_ids(7, 10, 5, 10) == [3, 0, 7, 2, 4, 7, 3, 6, 5, 0]


def test_micro_shards_cut_a_step() -> None:
    order = Order(seed=0, dataset_size=10, global_size=8, micro_shards=4)
    assert [p for m in range(4) for p in order.positions(2, m)] == list(range(8, 16))
    assert [spot.data_epoch for m in range(4) for spot in order.spots(2, m)] == [0, 0, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("global_size", "micro_shards"), [(8, 3), (0, 1), (4, 0), (4, -2)])
def test_unequal_micro_shards_are_refused(global_size: int, micro_shards: int) -> None:
    with pytest.raises(SettingsError, match="multiple"):
        loader(global_size=global_size, micro_shards=micro_shards)


# --- sharing and exactly-once


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_workers_share_a_step_without_overlap(world_size: int) -> None:
    shares = [[m for m in range(4) if m * world_size // 4 == rank] for rank in range(world_size)]
    alone, together = loader(), [loader() for _ in shares]
    alone.start(1, range(4))
    for each, mine in zip(together, shares, strict=True):
        each.start(1, mine)
    for lsn in range(1, 8):
        parts = {
            m: flat(b)
            for each, mine in zip(together, shares, strict=True)
            for m, b in zip(mine, each.step(lsn), strict=True)
        }
        assert [parts[m] for m in range(4)] == [flat(batch) for batch in alone.step(lsn)]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 10), max_size=4), st.integers(0, 5))
def test_exactly_once_over_two_data_epochs_whatever_restarts(restarts: list[int], seed: int) -> None:
    """20 samples, 8 a step: five steps are two data epochs, and the third step spans the border."""
    used = loader(size=20, seed=seed)
    seen: dict[int, list[int]] = {}
    used.start(1, range(4))
    for lsn in [*restarts, 1]:
        lsn = min(lsn, 5)
        used.start(lsn, range(4))  # the surviving history is what was done last
        for step in range(lsn, 6):
            seen[step] = ids_of(used.step(step))
    order = [i for step in range(1, 6) for i in seen[step]]
    assert sorted(order[:20]) == list(range(20)) == sorted(order[20:])


def test_a_batch_larger_than_the_data_set() -> None:
    used = loader(size=3)
    used.start(1, range(4))
    counts = Counter(ids_of(used.step(1) + used.step(2) + used.step(3)))
    assert counts == {0: 8, 1: 8, 2: 8}


# --- the loader


def test_an_aborted_step_is_given_again_unharmed() -> None:
    used = loader()
    used.start(3, [1, 2])
    first = used.step(3)
    before = [flat(batch) for batch in first]
    first[0][1].zero_()  # what a model that works in place would do
    assert [flat(batch) for batch in used.step(3)] == before
    assert used.step(4) is not None
    with pytest.raises(AssertionError, match="the next is 5"):
        used.step(3)
    with pytest.raises(AssertionError, match="the next is 5"):
        used.step(6)


def test_samples_change_from_data_epoch_to_data_epoch() -> None:
    used = loader(size=8)
    used.start(1, range(4))
    first, second = (
        {int(i): d for ids, draws in used.step(lsn) for i, d in zip(ids, draws, strict=True)} for lsn in (1, 2)
    )
    assert first.keys() == second.keys() and not any(torch.equal(first[i], second[i]) for i in first)


def test_no_micro_shards_at_all() -> None:
    used = loader(workers=2)
    used.start(1, [])
    assert used.step(1) == [] and not multiprocessing.active_children()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_loader_processes_give_the_same_bits_over_restarts() -> None:
    """Shares change, the cursor goes back and forth, and a step is repeated: nothing loaded ahead leaks."""
    for collate in (None, masking):
        plain, ahead = loader(collate=collate), loader(collate=collate, workers=2, prefetch=2)
        try:
            pids = set()
            for lsn, mine in ((1, [0, 1, 2, 3]), (3, [2]), (2, [3, 0]), (9, [1, 2])):
                plain.start(lsn, mine)
                ahead.start(lsn, mine)
                for step in (lsn, lsn + 1, lsn + 1, lsn + 2):
                    assert [flat(b) for b in ahead.step(step)] == [flat(b) for b in plain.step(step)]
                pids |= {child.pid for child in multiprocessing.active_children()}
            assert len(pids) == 2  # the processes stay over a start
        finally:
            ahead.close()
        assert not multiprocessing.active_children()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("by", ["step", "start"])
def test_a_killed_loader_process_is_replaced_at_the_same_step(by: str) -> None:
    plain, ahead = loader(), loader(workers=1, prefetch=1)
    plain.start(1, [0, 3])
    ahead.start(1, [0, 3])
    try:
        assert [flat(b) for b in ahead.step(1)] == [flat(b) for b in plain.step(1)]
        (child,) = multiprocessing.active_children()
        assert child.pid
        os.kill(child.pid, signal.SIGKILL)
        reached = 2
        with pytest.raises((RuntimeError, OSError, EOFError)):  # torch's signal handler, or the tensors are gone
            for lsn in range(2, 6):  # a step or two may have arrived already
                reached = lsn
                assert [flat(b) for b in ahead.step(lsn)] == [flat(b) for b in plain.step(lsn)]
        plain.start(reached, [0, 3])
        if by == "start":
            ahead.start(reached, [0, 3])
        assert [flat(b) for b in ahead.step(reached)] == [flat(b) for b in plain.step(reached)]
    finally:
        ahead.close()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_an_error_of_the_data_set_comes_through() -> None:
    for workers in (0, 1):
        used = BatchLoader(Refusing(4), seed=0, global_size=2, micro_shards=1, workers=workers)
        used.start(1, [0])
        with pytest.raises(KeyError, match="is broken"):
            used.step(1)
        assert not multiprocessing.active_children()  # although the traceback is still held
        used.close()


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_what_cannot_be_sent_is_said() -> None:
    used = loader(workers=1, collate=lambda samples: samples)
    with pytest.raises(TaskError, match="loader_workers = 0"):
        used.start(1, [0])


# --- seeds


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(())), float(np.random.standard_normal())]


def test_seed_all_sets_every_generator() -> None:
    seed_all(fold(1, "a"))
    first = draws()
    np.random.standard_normal()  # leaves a second normal waiting in NumPy's cache
    seed_all(fold(1, "a"))
    assert draws() == first
    seed_all(fold(1, "b"))
    assert not set(draws()) & set(first)
    assert len(set(first)) == 4


def test_step_seed_depends_on_each_part() -> None:
    seeds = {step_seed(s, lsn, m) for s in (0, 1) for lsn in (1, 2, 11) for m in (0, 1, 10)}
    assert len(seeds) == 18 and all(0 <= seed < 2**63 for seed in seeds)


def test_batches_that_are_left_out_move_what_comes_after_them() -> None:
    order = Order(seed=1, dataset_size=1000, global_size=8, micro_shards=2)
    skipping = Order(seed=1, dataset_size=1000, global_size=8, micro_shards=2, skips=((3, 2), (5, 1)))
    assert [batches_upto(lsn, skipping.skips) for lsn in (1, 3, 4, 5, 6)] == [1, 3, 6, 7, 9]
    for lsn, same_as in ((3, 3), (4, 6), (5, 7), (6, 9)):
        assert skipping.spots(lsn, 1) == order.spots(same_as, 1)
