"""Finding a run whose fault handler died: its actors live on under their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.actors.context import RunContext
from everstep.actors.environment import NAMESPACE, ray
from everstep.actors.member import Member
from everstep.actors.nodes import processes
from everstep.actors.spec import RunResult, actor_name
from everstep.core import clock

ANSWER_S = 5.0  # what is built and does not answer for so long is stuck, and killed

Answers = list[tuple[dict[str, Any], Any]]  # (status, handle)


@dataclass
class Found:
    """What is left of a run: actors that answered, and workers that are still being made."""

    workers: Answers = field(default_factory=list)
    checkpointers: Answers = field(default_factory=list)
    coming: list[Member] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.workers or self.checkpointers or self.coming)


def find(run: str) -> Found:
    """Return the actors of a run that live; those that should answer and do not are killed."""
    worker, checkpointer = actor_name(run, "worker/"), actor_name(run, "checkpointer/")
    known = ray.util.list_named_actors(all_namespaces=True)
    names = [item["name"] for item in known if item["namespace"] == NAMESPACE]
    handles = {name: _handle(name) for name in names if name.startswith((worker, checkpointer))}
    built, found = processes(), Found()
    asked = {h.status.remote(): n for n, h in handles.items() if h is not None and (n in built or not built)}
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
    answers = {asked[reference]: _answer(reference) for reference in done}
    for name, handle in handles.items():
        status = answers.get(name)
        if status is not None:
            (found.workers if name.startswith(worker) else found.checkpointers).append((status, handle))
        elif handle is not None and name not in asked and name.startswith(worker):
            found.coming.append(Member(name.removeprefix(worker), handle))
        elif handle is not None:
            node, pid = built.get(name, ("", 0))
            Member(name, handle, pid, node).kill()
    return found


def adopt(run: RunContext, found: Found) -> bool:
    """Take living actors over and have the workers come out of their group; False if none has a place in it."""
    waiting = [_member(status, handle) for status, handle in found.workers if status["world_rank"] is None]
    run.crew.newcomers.adopt(waiting, found.coming)
    placed = sorted((other for other in found.workers if other[0]["world_rank"] is not None), key=_place)
    if not placed:
        end(found.checkpointers)
        return False
    run.group_epoch = max(status["group_epoch"] for status, _ in found.workers)
    missing = placed[0][0]["world_size"] - len(placed)
    run.crew.members = [_member(*other) for other in placed] + [_lost() for _ in range(missing)]
    for member in run.crew.members:
        if member.result is None:
            member.actor.end_epoch.remote(run.group_epoch)
            member.run = member.actor.come_out.remote()  # waits behind what the old fault handler had them do
    _adopt_checkpointers(run, found.checkpointers)
    run.tell(f"the fault handler was restarted and found {len(placed)} workers alive")
    return True


def end(answers: Answers) -> None:
    """Kill actors that nobody takes over."""
    for status, handle in answers:
        Member("", handle, status.get("pid", 0), status.get("node", "")).kill()


def _adopt_checkpointers(run: RunContext, answers: Answers) -> None:
    generation = run.chain.manifest.generation
    mine = {status["index"]: (status, handle) for status, handle in answers if status["generation"] == generation}
    whole = len(mine) == len(run.checkpointers.shards)
    end([other for other in answers if not whole or other[0]["generation"] != generation])
    if whole:
        run.checkpointers.actors = [mine[index][1] for index in sorted(mine)]
        run.checkpointers.status = [mine[index][0] for index in sorted(mine)]
    else:
        run.renew_checkpointers()


def _handle(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None  # dead meanwhile


def _answer(reference: Any) -> dict[str, Any] | None:
    try:
        return dict(ray.get(reference))
    except ray.exceptions.RayError:
        return None  # dead, or dying


def _place(answer: tuple[dict[str, Any], Any]) -> tuple[int, int]:
    """Those of the last group first, by world rank: the fault handler may have died while one was formed."""
    return -answer[0]["group_epoch"], answer[0]["world_rank"]


def _member(status: Mapping[str, Any], handle: Any) -> Member:
    place = (status["pid"], status["node"])
    return Member(status["identity"], handle, *place, lsn=max(status["lsn"], 0), heard=clock.monotonic())


def _lost() -> Member:
    return Member("lost", None, result=RunResult("dead", 0))
