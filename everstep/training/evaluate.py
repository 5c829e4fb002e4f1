"""Evaluation: batches are dealt out to the workers, sums weighted by samples are added over the group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from everstep.training.blueprint import Blueprint
from everstep.training.data import to_device
from everstep.training.group import Group
from everstep.training.seeding import seed_all, step_seed
from everstep.training.train_step import autocast


@torch.no_grad()
def evaluate(
    blueprint: Blueprint, dataset: Dataset[Any], group: Group, device: torch.device, beat: Callable[[], None]
) -> dict[str, float]:
    """Return the mean loss and metrics over a data set; the same on every worker, all of which have to call this.

    Leaves nothing behind: buffers do not change in evaluation mode, and every step seeds itself.

    Args:
        blueprint: task, live model and settings.
        dataset: map-style, with a length.
        group: the process group.
        device: where the model is.
        beat: called after each batch, as a sign of life.
    """
    task, model, recipe = blueprint.task, blueprint.model, blueprint.recipe
    collate, measure = getattr(task, "collate", None), getattr(task, "metrics", None)
    size = recipe.global_size // recipe.micro_shards
    model.eval()
    sums: dict[str, float] = {}
    count = 0
    for number, batch in enumerate(DataLoader(dataset, batch_size=size, collate_fn=collate)):
        mine = number % group.world_size == group.world_rank
        if not mine and number:  # the first batch is everybody's, so that all know the names
            continue
        weight = min(size, len(dataset) - number * size) if mine else 0  # type: ignore[arg-type]  # sized
        seed_all(step_seed(recipe.seed, 0, number))
        moved = to_device(batch, device)
        with autocast(recipe.autocast, device):
            values = {"loss": task.loss(model, moved)} | (measure(model, moved) if measure else {})
        sums = {name: sums.get(name, 0.0) + float(value) * weight for name, value in values.items()}
        count += weight
        beat()
    names = sorted(sums)
    wire = torch.tensor([count, *(sums[name] for name in names)], dtype=torch.float64, device=device)
    group.all_reduce(wire)
    means = {name: float(value / wire[0]) for name, value in zip(names, wire[1:], strict=True)}
    return means | {"samples": float(wire[0])}
