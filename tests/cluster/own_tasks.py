"""Tasks that misbehave on purpose; job files name them as `tests.cluster.own_tasks:Name`."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from everstep.core import clock


class Line:
    """Fit a line: a model of nine numbers, so that a step takes no time.

    Args:
        poison: one sample of this many is not a number; 0 for none.
        raise_while: as long as this file exists, the loss raises once the poisoned sample is met.
        padding: numbers that the model carries along without using them; they make records and bases big.
        seconds: how long a micro-shard takes at least.
    """

    def __init__(self, poison: int = 0, raise_while: str = "", padding: int = 0, seconds: float = 0.0) -> None:
        self.poison, self.raise_while, self.padding, self.seconds = poison, raise_while, padding, seconds

    def model(self) -> nn.Module:
        model = nn.Linear(8, 1)
        if self.padding:
            model.register_parameter("padding", nn.Parameter(torch.zeros(self.padding)))
        return model

    def dataset(self, split: str) -> Dataset[tuple[Tensor, ...]]:
        x = torch.randn(256, 8, generator=torch.Generator().manual_seed(3))
        y = x.sum(1, keepdim=True)
        if self.poison:
            x[7 :: self.poison] = float("nan")
        return TensorDataset(x, y)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        x, y = batch
        clock.sleep(self.seconds)
        if self.raise_while and bool(torch.isnan(x).any()):
            if os.path.exists(self.raise_while):
                raise ZeroDivisionError("a mistake in my own loss")
            x = torch.nan_to_num(x)
        error = F.mse_loss(model(x), y)
        return error + 0.01 * (model.padding - 1).square().sum() if self.padding else error


class Empty(Line):
    """A task without data."""

    def dataset(self, split: str) -> Dataset[tuple[Tensor, ...]]:
        return TensorDataset(torch.zeros(0, 8), torch.zeros(0, 1))


class Ledger:
    """A model that counts: after any number of steps, parameter i is how often sample i was consumed.

    Its gradient is -1/micro_shards for each time a sample is seen, so with SGD at lr = micro_shards and no clipping the
    state itself is the ledger of the history that survived.

    Args:
        samples: how many there are.
        seconds: how long a micro-shard takes at least.
    """

    def __init__(self, samples: int = 600, seconds: float = 0.0) -> None:
        self.samples, self.seconds = samples, seconds

    def model(self) -> nn.Module:
        return _Counts(self.samples)

    def dataset(self, split: str) -> Dataset[tuple[Tensor, ...]]:
        return TensorDataset(torch.arange(self.samples))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        clock.sleep(self.seconds)
        return -model(batch[0]).sum()


class _Counts(nn.Module):
    def __init__(self, samples: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(samples))

    def forward(self, ids: Tensor) -> Tensor:
        return self.counts[ids]


class Normed(Line):
    """A model with batch norm and dropout: buffers that every micro-shard changes, and random numbers."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


class Wide(Line):
    """A model of 10 MB: its gradient is reduced in several stretches."""

    def model(self) -> nn.Module:
        layers = [nn.Linear(8, 1100), nn.Tanh(), nn.Linear(1100, 1100), nn.Tanh(), nn.Linear(1100, 1100), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(1100, 1))
