"""What changed between two steps of a run, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from everstep.storage.chain import Chain
from everstep.storage.plan import plan_restore
from everstep.training.blueprint import Blueprint
from everstep.training.holding import holding, planned
from everstep.training.recipe import Recipe
from everstep.training.restore import restore
from everstep.training.state import tensor_bytes

KINDS = {"param": "parameters", "optimizer": "optimizer", "buffer": "buffers"}


def diff(chain: Chain, recipe: Recipe, a: int, b: int) -> dict[str, Any]:
    """Return by tensor how the state at step `b` differs from that at step `a`, the most changed first.

    A row has: `l2`, the L2 norm of the difference; `relative`, that over the L2 norm at `a` (None where that is 0);
    `max_abs`, the largest difference of an element; `changed`, how many of `elements` have other bits. A tensor that
    only one of the steps has, such as optimizer state before the first step, counts as zero at the other: `only`.

    Raises:
        ChainError: one of the steps cannot be restored.
    """
    blueprint, listing = Blueprint(recipe), chain.listing()
    plans = [plan_restore(chain.manifest, listing, target=step) for step in (a, b)]
    rows: dict[str, list[dict[str, Any]]] = {title: [] for title in KINDS.values()}
    with holding(chain, planned(*plans)):
        for shard in chain.manifest.shards:  # one after the other: two whole states may be too much for the memory
            before, after = (
                restore(chain, blueprint, target=step, shards=[shard])[0][shard].state.tensors() for step in (a, b)
            )
            for name in sorted({*before, *after}):
                kind, _, short = name.partition("/")
                if kind == "note":
                    continue
                rows[KINDS[kind]].append({"tensor": short, **_row(before.get(name), after.get(name), a, b)})
    out: dict[str, Any] = {"run": chain.run, "step_a": a, "step_b": b}
    out |= {f"{title}_relative": _relative(part) for title, part in rows.items()}
    return out | {title: sorted(part, key=_rank) for title, part in rows.items()}


def _row(before: torch.Tensor | None, after: torch.Tensor | None, a: int, b: int) -> dict[str, Any]:
    given = after if before is None else before
    assert given is not None
    old = torch.zeros_like(given) if before is None else before
    new = torch.zeros_like(given) if after is None else after
    change = new.double() - old.double()
    norm, length = float(torch.linalg.vector_norm(old.double())), float(torch.linalg.vector_norm(change))
    return {
        "relative": length / norm if norm else (0.0 if length == 0 else None),
        "l2": length,
        "norm_a": norm,
        "max_abs": float(change.abs().max()) if change.numel() else 0.0,
        "changed": _changed(old, new),
        "elements": given.numel(),
        "only": None if before is not None and after is not None else (a if after is None else b),
    }


def _changed(old: torch.Tensor, new: torch.Tensor) -> int:
    """Count the elements whose bits differ: -0.0 is not 0.0, and a NaN is itself."""
    if not old.numel():
        return 0
    one, other = (torch.frombuffer(bytearray(tensor_bytes(t)), dtype=torch.uint8) for t in (old, new))
    return int((one != other).view(old.numel(), -1).any(dim=1).sum())


def _rank(row: Mapping[str, Any]) -> tuple[float, float, str]:
    """What came from nothing first, then by relative change."""
    relative = math.inf if row["relative"] is None else row["relative"]
    return -relative, -row["l2"], row["tensor"]


def _relative(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the relative change of all tensors as one vector; None where that was zero."""
    norm = math.hypot(*(row["norm_a"] for row in rows))
    return math.hypot(*(row["l2"] for row in rows)) / norm if norm else None
