"""A task of your own: a class with model, dataset and loss; `everstep train examples/own_task.toml` runs it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset


class Wine:
    """Which of three growers made the wine, from 13 chemical measurements; 178 wines, every fifth kept for validation.

    Args:
        hidden: units of the hidden layer; `[task] hidden` in the job file.
        noise: standard deviation of what is added to each training measurement, relative to that measurement's own.
    """

    def __init__(self, hidden: int = 32, noise: float = 0.1) -> None:
        self.hidden, self.noise = hidden, noise

    def model(self) -> nn.Module:
        """Return a fresh model; the generators are seeded already."""
        return nn.Sequential(nn.Linear(13, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 3))

    def dataset(self, split: str) -> Dataset[tuple[Tensor, Tensor]]:
        """Return a data set with a length and items; "validation" is what `[eval] split` names."""
        features, growers = (torch.from_numpy(array) for array in load_wine(return_X_y=True))
        features = ((features - features.mean(0)) / features.std(0)).float()
        held_out = torch.arange(len(features)) % 5 == 0
        chosen = held_out if split == "validation" else ~held_out
        return Noisy(TensorDataset(features[chosen], growers[chosen]), 0.0 if split == "validation" else self.noise)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """Return the mean over the batch."""
        features, growers = batch
        return F.cross_entropy(model(features), growers)

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        """Optional: more numbers for evaluation."""
        features, growers = batch
        return {"accuracy": (model(features).argmax(1) == growers).float().mean()}

    def parameter_groups(self, model: nn.Module) -> list[dict[str, object]]:
        """Optional: groups for the optimizer; here, no weight decay for biases."""
        weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        return [{"params": weights}, {"params": biases, "weight_decay": 0.0}]


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise when a sample is taken. Draw from the ordinary generators: they are seeded for every sample."""

    def __init__(self, samples: TensorDataset, noise: float) -> None:
        self.samples, self.noise = samples, noise

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features, grower = self.samples[index]
        return features + self.noise * torch.randn_like(features), grower
