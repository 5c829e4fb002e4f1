"""Everything a process builds from a recipe: task, model, layout and optimizer; the same in each process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everstep.compressors import Compressor, Reducer, build_compressor
from everstep.core.errors import TaskError
from everstep.tasks import Task, build_model, build_task
from everstep.tasks.described import Described
from everstep.training.layout import Layout, Slot, layout_of
from everstep.training.optimizer import advance_scheduler, build_optimizer, build_scheduler, exactness
from everstep.training.recipe import Recipe
from everstep.training.shard_state import ShardState
from everstep.training.state import TrainState, named_fixed


class Blueprint:
    """A built recipe: the model at its first state, and what is needed to make states of any of its shards.

    Args:
        recipe: what to build.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.task: Task = build_task(recipe.task, recipe.task_options)
        self.model: nn.Module = build_model(self.task, recipe.seed, recipe.init_from)
        self.groups = _groups(self.task, self.model)
        names = [[n for n, _ in group["named"]] for group in self.groups]
        self.layout: Layout = layout_of(self.model, names, recipe.shards)

    @property
    def exactness(self) -> str:
        """What a replay promises: "bitwise" or "close"."""
        if isinstance(self.task, Described):
            return self.task.replay
        return exactness(self.recipe.optimizer, self.recipe.optimizer_options)

    def compressor(self) -> Compressor | Reducer | None:
        """Return what chooses what is sent of a gradient; None: all of it. "auto" is top-k, if it pays."""
        spec = replace(self.recipe.compressor_spec, shapes=tuple(slot.shape for slot in self.layout.slots))
        return build_compressor("topk" if self.recipe.compressor == "auto" else self.recipe.compressor, spec)

    def live_state(self) -> TrainState:
        """Return the state of the whole model; its parameters are the model's own."""
        params = dict(self.model.named_parameters())
        mine = {slot.name: params[slot.name] for slot in self.layout.slots}
        return TrainState(mine, named_fixed(self.model, set(mine)), self._optimizer(mine))

    def shard_state(self, shard: int, *, blank: bool = False) -> ShardState:
        """Return a fresh copy of one shard's first state (lsn 0); `blank`: with any values, for those of a base."""
        params = dict(self.model.named_parameters())
        verify, made = self.exactness == "bitwise", torch.empty_like if blank else torch.clone
        if shard == 0:
            fixed = named_fixed(self.model, {slot.name for slot in self.layout.slots})
            return ShardState(0, (), TrainState({}, {n: made(t) for n, t in fixed.items()}, None), verify=verify)
        slots: Sequence[Slot] = self.layout.slots_of(shard)
        own = {slot.name: nn.Parameter(made(params[slot.name].detach())) for slot in slots}
        return ShardState(shard, slots, TrainState(own, {}, self._optimizer(own)), verify=verify)

    def schedule(self, optimizer: Optimizer, lsn: int) -> LRScheduler | None:
        """Set an optimizer's hyper-parameters to those of the step after `lsn`; return the schedule, standing there.

        A schedule is a function of the number of steps: it is taken through them, from the first hyper-parameters on.
        """
        first = self.live_state().optimizer
        assert first is not None
        for group, new in zip(optimizer.param_groups, first.param_groups, strict=True):
            group.pop("initial_lr", None)
            group.update({key: value for key, value in new.items() if key != "params"})
        scheduler = build_scheduler(self.recipe.scheduler, self.recipe.scheduler_options, optimizer)
        for _ in range(lsn):
            advance_scheduler(scheduler)
        return scheduler

    def _optimizer(self, params: Mapping[str, nn.Parameter]) -> Optimizer:
        groups = [
            {**group["options"], "params": [params[n] for n, _ in group["named"] if n in params]}
            for group in self.groups
        ]
        return build_optimizer(self.recipe.optimizer, self.recipe.optimizer_options, groups)


def _groups(task: Task, model: nn.Module) -> list[dict[str, Any]]:
    """Return the optimizer groups as names and options, whatever form the task gave them in."""
    named = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
    maker = getattr(task, "parameter_groups", None)
    if maker is None:
        return [{"named": [(n, p) for n, p in model.named_parameters() if p.requires_grad], "options": {}}]
    out: list[dict[str, Any]] = []
    for group in [{**given, "params": list(given["params"])} for given in maker(model)]:
        strangers = [tuple(p.shape) for p in group["params"] if id(p) not in named]
        if strangers:
            raise TaskError(
                f"parameter_groups names tensors of shape {strangers[:3]} that are no trainable parameters of it",
                hint="return groups over model.parameters() only",
            )
        out.append(
            {
                "named": [(named[id(p)], p) for p in group["params"]],
                "options": {k: v for k, v in group.items() if k != "params"},
            }
        )
    return out
