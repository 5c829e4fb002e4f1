"""A model that is known by its description alone: what a loop of its user's own hands to `everstep.attach`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from everstep.core.errors import SettingsError, TaskError

NAME = "everstep.tasks.described:Described"
SHOWN = 3  # differences that a message names


class Described:
    """The task of such a run: its states can be replayed, checked and exported; there is nothing to train it with.

    Everything is plain JSON, so that no process needs the user's code.

    Args:
        parameters: (name, dtype, shape, number of its optimizer group or None if frozen), as the model orders them.
        buffers: (name, dtype, shape) of the persistent ones.
        groups: the options of each optimizer group.
        notes: keys of the notes that the loop leaves with each step, see `training.state.NOTE`.
        replay: what a replay promises: "bitwise" or "close".
    """

    def __init__(
        self,
        parameters: Sequence[Sequence[Any]],
        buffers: Sequence[Sequence[Any]],
        groups: Sequence[Mapping[str, Any]],
        notes: Sequence[str],
        replay: str,
    ) -> None:
        self.parameters, self.buffers, self.groups = parameters, buffers, groups
        self.notes, self.replay = tuple(notes), replay

    def model(self) -> nn.Module:
        """Return a model with these tensors, all zero, under these names and in this order."""
        root = nn.Module()
        for name, dtype, shape, group in self.parameters:
            tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
            module, key = _place(root, name)  # not by `register_...`: containers take names that it refuses
            module._parameters[key] = nn.Parameter(tensor, requires_grad=group is not None)
        for name, dtype, shape in self.buffers:
            module, key = _place(root, name)
            module._buffers[key] = torch.zeros(shape, dtype=getattr(torch, dtype))
        root.everstep_notes = self.notes  # type: ignore[assignment]
        return root

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the optimizer's groups."""
        params = dict(model.named_parameters())
        groups: list[dict[str, Any]] = [{**options, "params": []} for options in self.groups]
        for name, _, _, group in self.parameters:
            if group is not None:
                groups[group]["params"].append(params[name])
        return groups

    def dataset(self, split: str) -> Dataset[Any]:
        """Refuse: the data is the loop's own."""
        raise _no_loop()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Refuse: so is the loss."""
        raise _no_loop()


def _no_loop() -> TaskError:
    return TaskError(
        "this run was written by a loop of its own (everstep.attach); its log holds neither data nor loss",
        hint="start that program again: log.restore() goes on from the last step",
    )


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, key = name.split(".")
    for part in path:
        inner = root._modules.get(part) or nn.Module()
        root._modules[part] = inner
        root = inner
    return root, key


def check_same(run: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse to go on with a run of another model.

    Args:
        run: its name.
        old: what its log says of it, as `[task]` holds it.
        new: the same of the model that is there now.

    Raises:
        SettingsError: says what differs.
    """
    found = _differing(old, new, "parameters") + _differing(old, new, "buffers")
    if len(old["groups"]) != len(new["groups"]):
        found.append(f"{len(old['groups'])} optimizer groups, now {len(new['groups'])}")
    if not found and [row[0] for row in old["parameters"]] != [row[0] for row in new["parameters"]]:
        found.append("the same parameters in another order")
    if found:
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise SettingsError(
            f"run {run!r} is of another model: {'; '.join(found[:SHOWN])}{more}",
            hint="hand over the model and the optimizer that it was begun with, or choose another run name",
        )


def _differing(old: Mapping[str, Any], new: Mapping[str, Any], kind: str) -> list[str]:
    before = {str(name): facts for name, *facts in old[kind]}
    after = {str(name): facts for name, *facts in new[kind]}
    found = [f"{name} is missing now" for name in before if name not in after]
    found += [f"{name} is new" for name in after if name not in before]
    return found + [
        f"{name}: {_shown(before[name])}, now {_shown(after[name])}"
        for name in before
        if name in after and list(before[name]) != list(after[name])
    ]


def _shown(facts: Sequence[Any]) -> str:
    dtype, shape, *group = facts
    of = "" if not group else " frozen" if group[0] is None else f" in group {group[0]}"
    return f"{dtype} {tuple(shape)}{of}"
