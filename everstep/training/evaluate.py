"""Evaluation: every worker takes its share of the batches, sums are added over the group."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset

from everstep.tasks import Task
from everstep.training.group import Group
from everstep.training.seeding import seed_all, step_seed


@torch.no_grad()
def evaluate(
    task: Task, model: torch.nn.Module, dataset: Dataset[object], group: Group, *, batch_size: int, seed: int,
    device: torch.device,
) -> dict[str, float]:  # fmt: skip
    """Return the mean loss and metrics over a data set, weighted by samples; the same on every worker.

    Leaves nothing behind: buffers do not change in evaluation mode, and every step seeds itself.
    """
    model.eval()
    collate = getattr(task, "collate", None)
    measure = getattr(task, "metrics", None)
    sums: dict[str, float] = {}
    count = 0
    for number, batch in enumerate(DataLoader(dataset, batch_size=batch_size, collate_fn=collate)):
        mine = number % group.world_size == group.world_rank
        if not mine and number:  # the first batch is everybody's, so that all know the names
            continue
        size = min(batch_size, len(dataset) - number * batch_size) if mine else 0  # type: ignore[arg-type]  # sized
        seed_all(step_seed(seed, 0, number))
        values = {"loss": task.loss(model, batch)} | (measure(model, batch) if measure else {})
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + float(value) * size
        count += size
    names = sorted(sums)
    wire = torch.tensor([count, *(sums[name] for name in names)], dtype=torch.float64, device=device)
    group.all_reduce(wire)
    total = max(float(wire[0]), 1.0)
    means = {name: float(value) / total for name, value in zip(names, wire[1:], strict=True)}
    return means | {"samples": float(wire[0])}
