"""Finding a run whose fault handler died: its actors live on under their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everstep.actors.context import RunContext
from everstep.actors.environment import NAMESPACE, ray
from everstep.actors.member import Member
from everstep.actors.spec import RunResult, actor_name
from everstep.core import clock

ANSWER_S = 5.0

Found = list[tuple[dict[str, Any], Any]]  # (status, handle)


def find(run: str) -> tuple[Found, Found]:
    """Return the workers and checkpoint actors of a run that live and answer."""
    known = ray.util.list_named_actors(all_namespaces=True)
    names = [item["name"] for item in known if item["namespace"] == NAMESPACE]
    return _answering(names, actor_name(run, "worker/")), _answering(names, actor_name(run, "checkpointer/"))


def adopt(run: RunContext, workers: Found, checkpointers: Found) -> bool:
    """Take living actors over and have the workers come out of their group; False if none has a place in it."""
    placed = sorted((found for found in workers if found[0]["world_rank"] is not None), key=_place)
    if not placed:
        return False
    run.group_epoch = max(status["group_epoch"] for status, _ in workers)
    missing = placed[0][0]["world_size"] - len(placed)
    run.crew.members = [_member(*found) for found in placed] + [_lost() for _ in range(missing)]
    run.crew.newcomers.adopt([_member(status, handle) for status, handle in workers if status["world_rank"] is None])
    for member in run.crew.members:
        if member.result is None:
            member.actor.end_epoch.remote(run.group_epoch)
            member.run = member.actor.come_out.remote()  # waits behind what the old fault handler had them do
    _adopt_checkpointers(run, checkpointers)
    run.tell(f"the fault handler was restarted and found {len(placed)} workers alive")
    return True


def _adopt_checkpointers(run: RunContext, found: Found) -> None:
    generation = run.chain.manifest.generation
    mine = {status["index"]: (status, handle) for status, handle in found if status["generation"] == generation}
    if len(mine) == len(run.checkpointers.shards):
        run.checkpointers.actors = [mine[index][1] for index in sorted(mine)]
        run.checkpointers.status = [mine[index][0] for index in sorted(mine)]
    else:
        run.renew_checkpointers()


def _place(found: tuple[dict[str, Any], Any]) -> tuple[int, int]:
    """Those of the last group first, by world rank: the fault handler may have died while one was formed."""
    return -found[0]["group_epoch"], found[0]["world_rank"]


def _answering(names: list[str], prefix: str) -> Found:
    out: Found = []
    for name in names:
        if name.startswith(prefix):
            try:
                handle = ray.get_actor(name, namespace=NAMESPACE)
                out.append((ray.get(handle.status.remote(), timeout=ANSWER_S), handle))
            except (ValueError, ray.exceptions.RayError):
                continue  # dead, or dying
    return out


def _member(status: Mapping[str, Any], handle: Any) -> Member:
    place = (status["pid"], status["node"])
    return Member(status["identity"], handle, *place, lsn=max(status["lsn"], 0), heard=clock.monotonic())


def _lost() -> Member:
    return Member("lost", None, result=RunResult("dead", 0))
