"""Our side of `recovery.py`: start a run, find its processes, strike one of them, read the log's account of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from everstep.actors.environment import NAMESPACE, ray
from everstep.actors.run import ENDED, Handle, launch
from everstep.actors.spec import actor_name, store_of
from everstep.core import clock
from everstep.core.ids import new_id
from everstep.platform.settings import from_dict
from everstep.storage.chain import Chain

PATIENCE_S = 240.0  # for whatever is waited for; on a loaded machine everything takes its time
LOOK_S = 0.05
ENDLESS = 1_000_000  # steps: the run is stopped when all is measured
WARM_STEPS = 30
BATCH, MICRO_SHARDS, LEARNING_RATE, CLIP_NORM = 16, 4, 3e-3, 1.0
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """What of a group of two is lost and what there is to go on with."""

    name: str
    least: int
    spares: int
    log_actors: int = 1

    def settings(self, store: str, size: str) -> Any:
        return from_dict(
            {
                "run": {"name": f"bench-{new_id()}", "store": store, "steps": ENDLESS, "seed": 1},
                "task": {"name": "char_lm", "size": size},
                "batch": {"global_size": BATCH, "micro_shards": MICRO_SHARDS},
                "workers": {"min": self.least, "max": 2, "start": 2, "spares": self.spares},
                "optimizer": {"name": "adamw", "lr": LEARNING_RATE, "clip_norm": CLIP_NORM},
                "checkpoint": {"actors": self.log_actors},
            }
        )


SURVIVOR = Case("ours, the survivor goes on", least=1, spares=0)
SPARE = Case("ours, a warm spare joins", least=2, spares=1)


def until(what: str, found: Callable[[], T | None]) -> T:
    """Wait for something; a benchmark that hangs says where."""
    deadline = clock.monotonic() + PATIENCE_S
    while clock.monotonic() < deadline:
        if answer := found():
            return answer
        clock.sleep(LOOK_S)
    raise SystemExit(f"waited {PATIENCE_S:.0f} s for {what}; lower --parameters, or run it on a quieter machine")


class Struck:
    """A run of ours in the Ray cluster that this process is in, and what is done to it."""

    def __init__(self, case: Case, store: str, size: str) -> None:
        self.case = case
        self.handle: Handle = launch(case.settings(store, size), resume=None)
        self.name = self.handle.settings.run.name or ""
        self._heard: dict[str, Any] = {}

    def progress(self) -> dict[str, Any]:
        state = self.handle.progress()
        if state["state"] in ENDED:
            self.handle.summary()  # raises what ended it
            raise SystemExit(f"run {self.name} ended too early: {state}")
        return state

    def statuses(self, role: str) -> list[dict[str, Any]]:
        """Return what the actors of a role say of themselves; those that are still being built do not answer."""
        known = ray.util.list_named_actors(all_namespaces=True)
        names = [item["name"] for item in known if item["name"].startswith(actor_name(self.name, f"{role}/"))]
        out = []
        for name in names:
            try:
                out.append(ray.get(ray.get_actor(name, namespace=NAMESPACE).status.remote(), timeout=2))
            except (ValueError, ray.exceptions.RayError):
                continue
        return out

    def group(self) -> list[dict[str, Any]]:
        """Return the two workers of the group, by world rank, once all is warm: each spare built, steps taken."""

        def warm() -> list[dict[str, Any]] | None:
            if self.progress()["lsn"] < WARM_STEPS:
                return None
            all_of = self.statuses("worker")
            idle = [one for one in all_of if one["world_rank"] is None]
            inside = sorted((one for one in all_of if one["world_size"] == 2), key=lambda one: one["world_rank"])
            return inside if len(inside) == 2 and len(idle) == self.case.spares else None

        found = until("two workers that train, and the spare beside them", warm)
        self._heard = found[0]
        return found

    def healed(self) -> None:
        """Wait until a step was finished after the fault."""
        until("the next step", lambda: any("healed from the survivor" in line for line in self.progress()["events"]))

    def two_again(self) -> float:
        """Wait until a step was finished by two workers again; return when that was seen."""

        def seen() -> float | None:
            bodies = [body for _, body in sorted(self._chain().events("size-").items())]
            stands = len(bodies) >= 3 and bodies[-1]["size"] == 2 and self.progress()["lsn"] > bodies[-1]["lsn"]
            return clock.wall() if stands else None

        return until("two workers again", seen)

    def end(self, killed: float) -> dict[str, Any]:
        """Stop the run, close it, and return the account: seconds since `killed`, steps taken again."""
        self.handle.stop()
        until("the end of the run", lambda: self.handle.progress()["state"] in ENDED)
        summary = self.handle.summary()
        healings = [body for _, body in sorted(self._chain().events("healing-").items())]
        self.handle.close()
        formed = [body["began"] + body["seconds_to_group_formed"] for body in healings]
        return {
            "case": self.case.name,
            "noticed_s": round(min(body["began"] for body in healings) - killed, 3),
            "group_s": round(max(formed) - killed, 3),
            "next_step_s": round(max(body["began"] + body["seconds_to_next_step"] for body in healings) - killed, 3),
            "steps_again": sum(body["steps_lost"] + body["steps_recomputed"] for body in healings),
            "healed": [f"{body['kind']} from the {body['tier']}" for body in healings],
            "exactness": summary["exactness"],
            "step_ms": round(1e3 * self._heard["step_s"], 1),
        }

    def _chain(self) -> Chain:
        return Chain.open(store_of(self.handle.settings), self.name)


def measure(case: Case, store: str, size: str, repeat: int) -> dict[str, Any]:
    """SIGKILL one worker of a fresh run; world ranks 0 and 1 in turn."""
    run = Struck(case, store, size)
    victim = run.group()[repeat % 2]
    killed = clock.wall()
    os.kill(victim["pid"], signal.SIGKILL)
    run.healed()
    again = None if case.least == 2 else run.two_again() - killed
    row = run.end(killed)
    return {**row, "new_step_s": row["next_step_s"], "two_again_s": round(again or row["next_step_s"], 3)}
