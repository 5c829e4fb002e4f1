"""`digits`: a small convolutional network on scikit-learn's 1,797 handwritten digits; it has BatchNorm and dropout."""

from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from everstep.core.errors import SettingsError, TaskError
from everstep.core.rng import fold
from everstep.tasks.task import TASKS

VALIDATION_ONE_IN = 5


class Net(nn.Module):
    """Images [B, 1, 8, 8] in [0, 1] -> scores [B, 10]."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=False),  # [B, 2 width, 4, 4]
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of the ten digits."""
        scores: Tensor = self.layers(images)
        return scores


def in_validation(index: int) -> bool:
    """Whether image `index` is kept for validation: a fixed fifth, by hash, the same for every seed."""
    return fold(0, "digits", index) % VALIDATION_ONE_IN == 0


@TASKS.register("digits")
class Digits:
    """Tell ten handwritten digits apart.

    Args:
        width: channels of the first convolution; the second has twice as many.
        dropout: probability, before the last layer.

    Raises:
        SettingsError: a value out of range.
    """

    def __init__(self, width: int = 32, dropout: float = 0.2) -> None:
        if width < 1:
            raise SettingsError(f"task.width = {width} is out of range", hint="give at least 1")
        if not 0 <= dropout < 1:
            raise SettingsError(f"task.dropout = {dropout} is out of range", hint="give 0 <= dropout < 1")
        self.width, self.dropout = width, float(dropout)

    def model(self) -> nn.Module:
        """Return a freshly initialised network."""
        return Net(self.width, self.dropout)

    def dataset(self, split: str) -> Dataset[tuple[Tensor, ...]]:
        """Return pairs (float32 [1, 8, 8] in [0, 1], int64 label) of "train" or "validation".

        Raises:
            TaskError: another split, or scikit-learn is not installed.
        """
        if split not in ("train", "validation"):
            raise TaskError(f"digits has no split {split!r}", hint="splits: train, validation")
        try:
            datasets = importlib.import_module("sklearn.datasets")
        except ImportError as error:
            message = f"digits: scikit-learn is not installed ({error})"
            raise TaskError(message, hint="pip install scikit-learn") from error
        data = datasets.load_digits()
        kept = torch.tensor([in_validation(i) == (split == "validation") for i in range(len(data.target))])
        images = torch.from_numpy(data.images).float().div(16).unsqueeze(1)
        return TensorDataset(images[kept], torch.from_numpy(data.target).long()[kept])

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """Return the mean cross entropy in nats; `batch` is (images, labels)."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
        """Return `accuracy`, the part of the batch that is told right."""
        images, labels = batch
        return {"accuracy": (model(images).argmax(1) == labels).float().mean()}
