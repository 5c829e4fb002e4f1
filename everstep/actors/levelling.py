"""Bringing a new group to one state: nobody rolls back, who is behind gets the state of one that is not.

A newcomer that caught up by itself keeps its own state if it is equal, bit for bit, to the one that others would get.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from everstep.actors.catching_up import quick_digest
from everstep.actors.process_group import ProcessGroup
from everstep.actors.state_transfer import give_state, take_state
from everstep.core.errors import RunFailed
from everstep.training.exchange import Exchange
from everstep.training.state import TrainState


@dataclass(frozen=True)
class Standing:
    """Where one worker stands when a group forms.

    Attributes:
        lsn: its last finished step; -1: its state is not the run's.
        check: a number that two workers share if they took the same last step.
        joining: whether it caught up by itself and has not trained yet.
        skipped: whether its last step was counted and not taken.
    """

    lsn: int
    check: int
    joining: bool
    skipped: bool


@dataclass(frozen=True)
class Levelled:
    """What came of it for one worker.

    Attributes:
        check: the number that all share now.
        received: whether the state came from a peer.
        drifted: whether it had to, although both had taken the same step.
        changed: whether this worker's state is another than when it last trained.
    """

    check: int
    received: bool
    drifted: bool
    changed: bool


def level(
    group: ProcessGroup, state: TrainState, exchange: Exchange, mine: Standing, *, replicated: bool
) -> Levelled:  # fmt: skip
    """Bring everybody to the highest finished step; all workers of the group call it.

    Args:
        group: the new group.
        state: this worker's state, replaced if it is behind.
        exchange: holds its residual, which follows the state.
        mine: where it stands.
        replicated: whether every worker has the same residual.

    Raises:
        RunFailed: nobody has the run's state.
    """
    row = torch.tensor([mine.lsn, mine.check, mine.joining], dtype=torch.int64, device=group.device)
    table = [tuple(int(value) for value in other) for other in group.all_gather(row)]
    top = max((lsn for lsn, _, joining in table if not joining), default=-1)
    if top < 0:
        raise RunFailed("no worker has a whole state", hint="`everstep resume` the run from the store")
    source = next(at for at, (lsn, _, joining) in enumerate(table) if lsn == top and not joining)
    check, place = table[source][1], group.world_rank
    level_with = _equal(
        group, state, source, [at for at, (lsn, _, joining) in enumerate(table) if joining and lsn == top]
    )
    behind = {at for at, other in enumerate(table) if other[:2] != (top, check) and at not in level_with}
    if place == source:
        _give(
            group, state, exchange, mine, check, whole=bool(behind), residual=replicated and bool(behind | level_with)
        )
    elif behind or (level_with and replicated and exchange.residual is not None):
        _take(group, state, exchange, source, received=place in behind, joined=place in level_with)
    if place in level_with and not replicated:
        exchange.adopt(top, None)
    received = place in behind
    return Levelled(check, received, received and table[place][0] == top, received or place in level_with)


def _equal(group: ProcessGroup, state: TrainState, source: int, candidates: list[int]) -> set[int]:
    """Return those of `candidates` whose state has the bits of the source's."""
    if not candidates:
        return set()
    digest = quick_digest(state.tensors()) if group.world_rank in (source, *candidates) else 0
    row = torch.tensor([digest], dtype=torch.int64, device=group.device)
    found = [int(other) for other in group.all_gather(row)]
    return {at for at in candidates if found[at] == found[source]}


def _give(
    group: ProcessGroup, state: TrainState, exchange: Exchange, mine: Standing, check: int, *,
    whole: bool, residual: bool,
) -> None:  # fmt: skip
    tensors = dict(state.tensors()) if whole else {}
    if residual and exchange.residual is not None:
        tensors["residual"] = exchange.residual
    if tensors:
        give_state(group, {"lsn": mine.lsn, "check": check, "skipped": int(mine.skipped)}, tensors)


def _take(
    group: ProcessGroup, state: TrainState, exchange: Exchange, source: int, *, received: bool, joined: bool
) -> None:  # fmt: skip
    facts, tensors = take_state(group, source)
    residual = tensors.pop("residual", None)
    if received:
        state.load(tensors, facts["lsn"])
    if received or joined:
        exchange.adopt(facts["lsn"], residual, skipped=bool(facts["skipped"]) and received)
