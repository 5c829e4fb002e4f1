"""Which sample is seen when is a pure function; loading only looks ahead along it and never moves the cursor.

Positions count the samples of a run from 0: step `lsn` (from 1) consumes positions (lsn - 1) * global_size up to
lsn * global_size, whoever computes them, and micro-shard m of M is the m-th contiguous slice of those. Batches that
are left out move all later positions on. Each data epoch is one permutation of the data set; a step may span the
border between two.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from everstep.core.errors import SettingsError, TaskError
from everstep.core.rng import fold
from everstep.training.seeding import seed_all

Collate = Callable[[list[Any]], Any]


def batches_upto(lsn: int, skips: Sequence[tuple[int, int]]) -> int:
    """Return how many global batches are behind the run after step `lsn`: one a step, and those left out.

    Args:
        lsn: the step.
        skips: (step, batches left out after it).
    """
    return lsn + sum(count for after, count in skips if after < lsn)


def data_epoch(position: int, size: int) -> int:
    """Return the data epoch, from 0, that `position` falls into with `size` samples in the data set."""
    return position // size


@lru_cache(maxsize=2)  # the data epoch at hand and its neighbour, while a step or the look-ahead spans the border
def _permutation(seed: int, size: int, epoch: int) -> npt.NDArray[np.intp]:
    # Raw bits and a stable sort: NumPy promises these for ever, and not the results of its shuffles.
    return np.argsort(np.random.PCG64(fold(seed, "order", epoch)).random_raw(size), kind="stable")


def sample_ids(seed: int, dataset_size: int, start: int, count: int) -> list[int]:
    """Return the sample ids at positions `start` up to `start + count`: every id once per data epoch."""
    ids: list[int] = []
    end = start + count
    while start < end:
        epoch, offset = divmod(start, dataset_size)
        taken = _permutation(seed, dataset_size, epoch)[offset : offset + end - start]
        ids += taken.tolist()
        start += len(taken)
    return ids


class Spot(NamedTuple):
    """One place in the order of samples."""

    position: int
    data_epoch: int
    sample_id: int


@dataclass(frozen=True)
class Order:
    """The order in which one run sees its samples.

    Args:
        seed: `[run] seed`.
        dataset_size: samples in the data set.
        global_size: samples a step, over all workers.
        micro_shards: equal slices of a step.
        skips: batches that are left out, as (step, batches after it).

    Raises:
        SettingsError: the micro-shards do not divide the global batch, or a number is not positive.
    """

    seed: int
    dataset_size: int
    global_size: int
    micro_shards: int
    skips: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if min(self.dataset_size, self.global_size, self.micro_shards) < 1 or self.global_size % self.micro_shards:
            raise SettingsError(
                f"batch.global_size = {self.global_size} samples cannot be cut into "
                f"batch.micro_shards = {self.micro_shards} equal parts",
                hint="make global_size a multiple of micro_shards, both at least 1",
            )

    @property
    def micro_size(self) -> int:
        """Samples a micro-shard."""
        return self.global_size // self.micro_shards

    def positions(self, lsn: int, micro_shard: int) -> range:
        """Return the positions that `micro_shard` of step `lsn` consumes."""
        start = (batches_upto(lsn, self.skips) - 1) * self.global_size + micro_shard * self.micro_size
        return range(start, start + self.micro_size)

    def spots(self, lsn: int, micro_shard: int) -> list[Spot]:
        """Return positions, data epochs and sample ids of `micro_shard` of step `lsn`."""
        positions = self.positions(lsn, micro_shard)
        ids = sample_ids(self.seed, self.dataset_size, positions.start, len(positions))
        return [Spot(p, data_epoch(p, self.dataset_size), i) for p, i in zip(positions, ids, strict=True)]


class _Samples(Dataset[tuple[int, Any]]):
    """The user's data set, asked by spot, with the generators set for each sample."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, spot: Spot) -> tuple[int, Any]:
        seed_all(fold(self.seed, "sample", spot.data_epoch, spot.sample_id))
        return spot.position, self.dataset[spot.sample_id]


class _Batches:
    """Samples of one step -> one batch a micro-shard; the generators are set for each (a collate may draw a mask)."""

    def __init__(self, collate: Collate, seed: int, size: int) -> None:
        self.collate, self.seed, self.size = collate, seed, size

    def __call__(self, samples: list[tuple[int, Any]]) -> list[Any]:
        return [self._batch(samples[i : i + self.size]) for i in range(0, len(samples), self.size)]

    def _batch(self, samples: list[tuple[int, Any]]) -> Any:
        seed_all(fold(self.seed, "collate", samples[0][0]))
        return self.collate([sample for _, sample in samples])


class _Steps(Sampler[list[Spot]]):
    """All spots of this worker, step after step without end, from wherever `lsn` stands when iteration begins."""

    def __init__(self, order: Order) -> None:
        self.order, self.lsn, self.mine = order, 1, ()  # type: tuple[Order, int, tuple[int, ...]]

    def of(self, lsn: int) -> list[Spot]:
        return [spot for micro_shard in self.mine for spot in self.order.spots(lsn, micro_shard)]

    def __iter__(self) -> Iterator[list[Spot]]:
        lsn = self.lsn
        while True:
            yield self.of(lsn)
            lsn += 1


class BatchLoader:
    """The batches of one worker, step by step: the same bits whatever `workers`, `prefetch` and restarts.

    Randomness inside `dataset[i]` is keyed by (seed, data epoch, sample id), and inside `collate` by (seed, position):
    all global generators are set before each and *not* put back, since every micro-shard sets its own before its
    forward pass. So take the batches of a step first, then seed. `dataset[i]` must depend on nothing but `i` and these
    generators.

    A loader process that dies raises a RuntimeError in the main thread, at any moment (torch's signal handler). The
    next `start` or `step` begins again at the step that was due, with new processes.

    Args:
        dataset: map-style, with a length. With `workers` it is pickled to other processes.
        seed: `[run] seed`.
        global_size: samples a step, over all workers.
        micro_shards: equal slices of a step.
        workers: loader processes; 0 loads inside the call. They are spawned, never forked, as actors have threads.
        prefetch: steps that each loader process works ahead.
        collate: list of samples -> batch; None is torch's `default_collate`.
        skips: batches that are left out, as (step, batches after it).

    Raises:
        SettingsError: the micro-shards do not divide the global batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        seed: int,
        global_size: int,
        micro_shards: int,
        workers: int = 0,
        prefetch: int = 2,
        collate: Collate | None = None,
        skips: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.order = Order(seed, len(cast(Any, dataset)), global_size, micro_shards, skips)
        self._samples = _Samples(dataset, seed)
        self._batches = _Batches(collate or default_collate, seed, self.order.micro_size)
        self._steps = _Steps(self.order)
        self._workers, self._prefetch = workers, prefetch
        self._loader: DataLoader[Any] | None = None
        self._ahead: Iterator[list[Any]] | None = None
        self._served = 0

    def start(self, lsn: int, mine: Sequence[int]) -> None:
        """Go to step `lsn`, forward or back, and drop what was loaded ahead; loader processes stay.

        Args:
            lsn: the step that `step` is called for next.
            mine: the micro-shards of this worker, in the order their batches are wanted.

        Raises:
            TaskError: data set or collate cannot be sent to loader processes.
        """
        assert lsn >= 1 and all(0 <= m < self.order.micro_shards for m in mine), (lsn, mine)
        self._steps.lsn, self._steps.mine = lsn, tuple(mine)
        self._served, self._ahead = 0, None
        if self._workers and mine:
            self._look_ahead()

    def step(self, lsn: int) -> list[Any]:
        """Return the batches of this worker's micro-shards for step `lsn`, in the order given to `start`.

        Steps come in order. The last one may be asked for again, after it was aborted: it is loaded afresh, so that
        nothing the aborted attempt wrote into its batches is seen.
        """
        if lsn == self._served:
            return self._load(lsn)
        assert lsn == self._steps.lsn, f"step {lsn} asked for, the next is {self._steps.lsn}"
        batches = self._next() if self._workers and self._steps.mine else self._load(lsn)
        self._served, self._steps.lsn = lsn, lsn + 1
        return batches

    def close(self) -> None:
        """End the loader processes; `start` or `step` would begin anew."""
        # Dropping the iterator would do, were it not that the traceback of an error may hold on to it.
        shut_down = getattr(getattr(self._loader, "_iterator", None), "_shutdown_workers", None)
        self._ahead = self._loader = None
        if shut_down is not None:
            shut_down()

    def _load(self, lsn: int) -> list[Any]:
        with _one_thread():
            return self._batches([self._samples[spot] for spot in self._steps.of(lsn)])

    def _next(self) -> list[Any]:
        if self._ahead is None:
            self._look_ahead()
        assert self._ahead is not None
        try:
            return next(self._ahead)
        except BaseException:
            self.close()  # what was loaded ahead may be out of step now; the next call begins at this step again
            raise

    def _look_ahead(self) -> None:
        """Begin loading at the next step. A persistent `DataLoader` drops its outstanding work when iterated again."""
        kept = self._loader is not None
        try:
            if self._loader is None:
                self._loader = self._new_loader()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Got pickle error")  # it advises to fork; ours follows
                self._ahead = iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self.close()
            if kept:
                raise
            raise TaskError(
                f"data set {type(self._samples.dataset).__name__} or collate cannot go to a loader process: {error}",
                hint="define both at the top level of a module and keep no open files, or set batch.loader_workers = 0",
            ) from error
        except (RuntimeError, OSError, EOFError):
            self.close()
            if not kept:
                raise
            self._look_ahead()  # a loader process had died since, and its tensors with it: again with fresh ones

    def _new_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._samples,
            batch_sampler=self._steps,
            num_workers=self._workers,
            prefetch_factor=self._prefetch,
            collate_fn=self._batches,
            multiprocessing_context="spawn",
            persistent_workers=True,
            generator=torch.Generator(),  # else it draws from the global one
        )


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on `device`; tuples, lists and dictionaries are gone through."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


@contextmanager
def _one_thread() -> Iterator[None]:
    """As in a loader process: a reduction's bits may depend on the number of threads."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
