"""Forking at the level of states: whether a fork can go on from its parent's, and from what it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from everstep.core.errors import SettingsError
from everstep.storage.chain import Chain
from everstep.storage.fork import fork
from everstep.storage.manifest import Manifest
from everstep.storage.plan import plan_restore
from everstep.training.blueprint import Blueprint
from everstep.training.holding import planned
from everstep.training.recipe import Recipe
from everstep.training.state import state_shapes

HINT = "a fork goes on from the parent's state; leave this as it was, or start a new run (task.init_from takes weights)"
SHOWN = 3


def start_fork(
    parent: Chain, step: int, run: str, old: Recipe, new: Recipe, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Start the run `run` from the state of `parent` at `step`; return what it starts from.

    Args:
        parent: the run to fork.
        step: an lsn that can be restored.
        run: the new run's name.
        old: the parent's recipe.
        new: the fork's.
        settings: the fork's effective settings.

    Raises:
        SettingsError: the fork cannot go on from the parent's state.
        ChainError: the step cannot be restored.
        RunExists: there is a run of that name.
    """
    blueprint = Blueprint(new)
    check_fork(Blueprint(old), blueprint)
    residual = residual_of(old, new, parent.manifest, step)
    child = fork(parent, step, run, settings=settings, exactness=blueprint.exactness)
    if residual["start"] != "snapshot" and child.manifest.compressor:
        child.update(compressor=())  # of another compressor, or of none
    plan = plan_restore(child.manifest, child.listing())
    return {
        "run": run,
        "origin": f"{parent.run}@{step}",
        "step": plan.target,
        "exactness": child.manifest.exactness,
        "shared_objects": len(planned(plan)),
        "residual": residual["start"],
        "parent_snapshots": residual["snapshots"],
    }


def check_fork(old: Blueprint, new: Blueprint) -> None:
    """Refuse a fork whose model, layout or optimizer state is not the parent's.

    Args:
        old: of the parent's recipe.
        new: of the fork's.

    Raises:
        SettingsError: they differ; the message says in what.
    """
    for what, before, after in (
        ("parameters and buffers", _tensors(old), _tensors(new)),
        ("optimizer groups", _groups(old), _groups(new)),
        ("the cut into shards", _shards(old), _shards(new)),
        ("the optimizer's state", _optimizer(old), _optimizer(new)),
    ):
        differing = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        if differing:
            shown = "; ".join(
                f"{k}: {_said(before, k)} in the parent, {_said(after, k)} here" for k in differing[:SHOWN]
            )
            more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            raise SettingsError(f"the fork differs from its parent in {what}: {shown}{more}", hint=HINT)


def residual_of(old: Recipe, new: Recipe, manifest: Manifest, step: int) -> dict[str, Any]:
    """Return where a fork's residual (error feedback) starts.

    `start` is "none" if the fork has no residual, "snapshot" if the parent's at just this step is taken over, else
    "zero"; `snapshots` are the steps that have one.
    """
    snapshots = [snapshot.lsn for snapshot in manifest.compressor]
    same = (old.compressor, old.residual) == (new.compressor, new.residual)
    start = "none" if not new.keeps_residual else "snapshot" if same and step in snapshots else "zero"
    return {"start": start, "snapshots": snapshots}


def _said(values: dict[str, Any], key: str) -> str:
    return str(values[key]) if key in values else "nothing"


def _tensors(blueprint: Blueprint) -> dict[str, Any]:
    live = blueprint.live_state()
    found = {f"param/{name}": param for name, param in live.params.items()} | live.fixed
    return {name: f"{tuple(tensor.shape)} {_kind(tensor)}" for name, tensor in found.items()}


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _groups(blueprint: Blueprint) -> dict[str, Any]:
    return {slot.name: f"group {slot.group}" for slot in blueprint.layout.slots}


def _shards(blueprint: Blueprint) -> dict[str, Any]:
    layout = blueprint.layout
    return {slot.name: f"shard {part.shard}" for part in layout.ranges for slot in layout.slots_of(part.shard)}


def _optimizer(blueprint: Blueprint) -> dict[str, Any]:
    optimizer = blueprint.live_state().optimizer
    if optimizer is None:
        return {}
    kept = state_shapes(optimizer)
    return {"class": type(optimizer).__qualname__, "state": "unknown" if kept is None else sorted(kept)}
