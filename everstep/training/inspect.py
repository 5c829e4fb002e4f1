"""Looking at a stored run: what it holds, and taking a state out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from everstep.core.errors import ChainError, StepNotKept
from everstep.storage.chain import Chain
from everstep.storage.check import used
from everstep.storage.keys import BaseKey, CompressorKey, SegmentKey, inside
from everstep.storage.listing import Listing
from everstep.storage.manifest import Base, Manifest
from everstep.storage.plan import plan_restore
from everstep.storage.runs import forks_of
from everstep.training.blueprint import Blueprint
from everstep.training.history import Events, best, bodies, evaluations, gaps
from everstep.training.holding import holding, planned
from everstep.training.recipe import Recipe
from everstep.training.restore import restore
from everstep.training.shard_state import digest_of

FAULT_KEYS = ("kind", "step", "tier", "steps_lost", "seconds_to_next_step", "exactness")


def describe(chain: Chain) -> dict[str, Any]:
    """Return what a run's log holds: structure, sizes, history, and which steps can be restored."""
    manifest, listing, events = chain.manifest, chain.listing(), chain.events()
    foreign = {key for key in used(manifest, listing) if key.run}
    out: dict[str, Any] = {
        "run": chain.run,
        "state": manifest.state,
        "generation": manifest.generation,
        "manifest": manifest.version,
        "exactness": manifest.exactness,
        "origin": f"{manifest.origin.run}@{manifest.origin.step}" if manifest.origin else None,
        "encrypted_with": manifest.key_id or None,
        "shards": len(manifest.shards),
    }
    out |= _reach(manifest, listing)
    out |= {
        "segments": sum(not key.run for key in listing.segments()),
        "shared_objects": len(foreign),
        "bases": sorted({base.lsn for base in listing.bases() if not base.run or base in foreign}),
        "compressor_snapshots": [snapshot.lsn for snapshot in manifest.compressor],
        "dropped": len(manifest.dropped),
        "bytes_logged": listing.bytes_of(SegmentKey),
        "bytes_bases": listing.bytes_of(BaseKey),
        "bytes_compressor_state": listing.bytes_of(CompressorKey),
        "best": best(events),
        "strays": list(listing.strays),
        "kept": [{"first": kept.first, "last": kept.last} for kept in manifest.kept],
        "rounds": _rounds(manifest, listing),
        "forks": forks_of(chain),
        "rewinds": bodies(events, "rewound-"),
        "gaps": gaps(events),
        "evaluations": evaluations(events),
        "faults": _faults(events),
    }
    return out


def _reach(manifest: Manifest, listing: Listing) -> dict[str, Any]:
    if not manifest.shards:
        return {"last_restorable": None, "highest_seen": None, "damage": None}
    try:
        plan = plan_restore(manifest, listing)
    except ChainError as error:
        return {"last_restorable": None, "highest_seen": None, "damage": error.message}
    return {"last_restorable": plan.target, "highest_seen": plan.highest, "damage": None}


def _rounds(manifest: Manifest, listing: Listing) -> list[dict[str, Any]]:
    """Return the named bases by round: the lsn of each shard's, and the bytes of all; missing ones are said to be."""
    there = {key for key in listing.bases()}
    rounds: dict[int, list[Base]] = {}
    for base in manifest.bases:
        rounds.setdefault(base.round, []).append(base)
    return [
        {
            "round": number,
            "first": min(base.lsn for base in bases),
            "last": max(base.lsn for base in bases),
            "shards": len(bases),
            "bytes": sum(base.size for base in bases),
            "lsns": {str(base.shard): base.lsn for base in bases},
            "missing": [inside(manifest.run, base.key) for base in bases if base.key not in there],
        }
        for number, bases in sorted(rounds.items())
    ]


def _faults(events: Events) -> list[dict[str, Any]]:
    return [{key: body[key] for key in FAULT_KEYS} for body in bodies(events, "healing-")]


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
    with holding(chain, planned(plan_restore(chain.manifest, chain.listing(), target=target))):
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
        "digest": digest_of(states.values()),
        "exactness": chain.manifest.exactness,
        "safetensors": str(weights),
        "state_dict": str(whole),
        "damaged_objects_left_out": sorted(inside(chain.run, key) for key in damage),
    }


def _best(chain: Chain) -> int:
    found = best(chain.events())
    if found is None:
        raise StepNotKept(f"run {chain.run} has no evaluation, so there is no best step", hint="give --step a number")
    return int(found["lsn"])
