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
        size = min(batch_size, len(dataset) - number * batch_size)  # type: ignore[arg-type]  # sized, checked when built
        if number % group.world_size != group.world_rank:
            continue
        seed_all(step_seed(seed, 0, number))
        values = {"loss": task.loss(model, batch)} | (measure(model, batch) if measure else {})
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + float(value) * size
        count += size
    return _reduced(sums, count, group, device)


def _reduced(sums: dict[str, float], count: int, group: Group, device: torch.device) -> dict[str, float]:
    """Add sums over the group. A worker without a batch knows no names, so the names come from world rank 0."""
    names = sorted(sums)
    wire = torch.zeros(33, dtype=torch.float64, device=device)
    wire[0] = count
    for at, name in enumerate(names[:32], start=1):
        wire[at] = sums[name]
    group.all_reduce(wire)
    total = max(float(wire[0]), 1.0)
    return {name: float(wire[at]) / total for at, name in enumerate(names[:32], start=1)} | {"samples": float(wire[0])}
