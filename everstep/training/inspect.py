"""Looking at a stored run: what it holds, whether it replays, and taking a state out of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from everstep.core.errors import ChainError, StateMismatch, StepNotKept
from everstep.storage.chain import Chain
from everstep.storage.keys import BaseKey, CompressorKey, DataKey, SegmentKey, inside
from everstep.storage.plan import plan_restore
from everstep.training.blueprint import Blueprint
from everstep.training.recipe import Recipe
from everstep.training.restore import restore
from everstep.training.shard_state import ShardState
from everstep.training.state import combine_digests

FAULT_KEYS = ("kind", "step", "tier", "steps_lost", "seconds_to_next_step", "exactness")


def describe(chain: Chain) -> dict[str, Any]:
    """Return what a run's log holds: structure, sizes, and which steps can be restored."""
    listing, manifest = chain.listing(), chain.manifest
    events = chain.events()
    evaluations = _bodies(events, "eval-")
    best = min(evaluations, key=lambda body: float(body["loss"]), default=None)
    out: dict[str, Any] = {
        "run": chain.run,
        "state": manifest.state,
        "generation": manifest.generation,
        "exactness": manifest.exactness,
        "shards": len(manifest.shards),
        "segments": len(listing.segments()),
        "bases": sorted({base.lsn for base in listing.bases()}),
        "bytes_logged": listing.bytes_of(SegmentKey),
        "bytes_bases": listing.bytes_of(BaseKey),
        "bytes_compressor_state": listing.bytes_of(CompressorKey),
        "compressor_snapshots": [snapshot.lsn for snapshot in manifest.compressor],
        "faults": [{key: body[key] for key in FAULT_KEYS} for body in _bodies(events, "healing-")],
        "gaps": _bodies(events, "gap-"),
        "best": best,
        "strays": list(listing.strays),
    }
    try:
        plan = plan_restore(manifest, listing)
        out |= {"last_restorable": plan.target, "highest_seen": plan.highest, "damage": None}
    except ChainError as error:
        out |= {"last_restorable": None, "highest_seen": None, "damage": error.message}
    return out


def verify(chain: Chain, recipe: Recipe) -> dict[str, Any]:
    """Read every object of the log and replay it from its oldest rounds to its end, checking every digest on the way.

    Raises:
        ChainError: an object is damaged or missing.
        StateMismatch: the replayed state is not the one that was logged.
    """
    listing = chain.listing()
    keys: list[DataKey] = [*listing.segments(), *listing.bases(), *listing.compressor()]
    for key in keys:
        chain.read(key)
    blueprint = Blueprint(recipe)
    oldest = max(min(b.lsn for b in listing.bases(shard)) for shard in chain.manifest.shards)
    later = frozenset(base for base in listing.bases() if base.lsn > oldest)
    bridged = bool(_bodies(chain.events(), "gap-"))  # the run itself said so: nothing can be replayed across a gap
    states, plan, _ = restore(chain, blueprint, exclude=frozenset() if bridged else later)
    digest = _digest(states)
    closing = chain.manifest.closing
    live = closing["digest"] if closing else None
    if live is not None and live != digest and chain.manifest.exactness != "close":
        raise StateMismatch(
            f"run {chain.run}: the replayed state of step {plan.target} is {digest[:12]}, the live one was {live[:12]}",
            hint="if this is another processor or torch version than the run's, replay it there",
        )
    return {
        "run": chain.run,
        "step": plan.target,
        "digest": digest,
        "live_digest": live,
        "equal": None if live is None else live == digest,
        "exactness": chain.manifest.exactness,
        "replayed_steps": plan.target - oldest,
        "objects_checked": len(listing.objects),
        "highest_seen": plan.highest,
    }


def export(chain: Chain, recipe: Recipe, step: int | str | None, out: str) -> dict[str, Any]:
    """Write the state at a step as `model.safetensors` and as `state_dict.pt` (model, optimizer, lsn).

    Args:
        chain: the run.
        recipe: how to build its model.
        step: an lsn; "best" for the lowest evaluated loss; None for the last step that can be restored.
        out: the folder to write to.
    """
    target = _best(chain) if step == "best" else step
    assert target is None or isinstance(target, int)
    blueprint = Blueprint(recipe)
    states, plan, damage = restore(chain, blueprint, target=target)
    tensors = {name: tensor for state in states.values() for name, tensor in state.state.tensors().items()}
    live = blueprint.live_state()
    live.load(tensors, plan.target)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{chain.run}-step-{plan.target}"
    weights, whole = folder / f"{stem}.safetensors", folder / f"{stem}.pt"
    model = blueprint.model.state_dict()
    save_file({name: tensor.clone().contiguous() for name, tensor in model.items()}, weights)
    assert live.optimizer is not None
    blueprint.schedule(live.optimizer, plan.target)
    torch.save({"model": model, "optimizer": live.optimizer.state_dict(), "lsn": plan.target}, whole)
    return {
        "run": chain.run,
        "step": plan.target,
        "digest": _digest(states),
        "exactness": chain.manifest.exactness,
        "safetensors": str(weights),
        "state_dict": str(whole),
        "damaged_objects_left_out": sorted(inside(chain.run, key) for key in damage),
    }


def _bodies(events: Mapping[str, Any], prefix: str) -> list[Any]:
    return [body for name, body in sorted(events.items()) if name.startswith(prefix)]


def _digest(states: dict[int, ShardState]) -> str:
    return combine_digests({n: d for state in states.values() for n, d in state.state.tensor_digests().items()})


def _best(chain: Chain) -> int:
    evaluations = _bodies(chain.events(), "eval-")
    if not evaluations:
        raise StepNotKept(f"run {chain.run} has no evaluation, so there is no best step", hint="give --step a number")
    return int(min(evaluations, key=lambda body: float(body["loss"]))["lsn"])
