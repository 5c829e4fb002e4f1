"""What was lost, from where it was healed and what that cost; stored, so that it survives everybody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from everstep.actors.notebook import Notebook
from everstep.core import clock
from everstep.core.errors import StoreError
from everstep.storage.chain import Chain

STRIKES = {  # which injected faults look like what
    "checkpointer_lost": {"kill_checkpointer"},
    "fault_handler_lost": {"kill_fault_handler"},
}
STRIKES |= dict.fromkeys(
    ("worker_lost", "workers_lost", "hang", "user_error"),
    {"kill_worker", "stop_worker", "raise_in_worker", "kill_workers"},
)
WITHOUT_PAUSE = ("checkpointer_lost", "kill_checkpointer", "fault_handler_lost", "kill_fault_handler")


@dataclass
class Healing:
    """One fault and its cure.

    Attributes:
        kind: the injected fault's kind, or "worker_lost", "workers_lost", "hang", "user_error", "checkpointer_lost",
            "fault_handler_lost", "cluster_lost".
        step: the step that was under way.
        tier: where the state came from: "survivor", "replica" or "store".
        steps_lost: finished steps that had to be taken again because no record of them was left.
        steps_recomputed: finished steps that were taken again, compared with their records.
        exactness: "bitwise", "close" or "warm".
        injected: whether the job file asked for it.
        seconds_to_group_formed: from the fault to the new group.
        seconds_to_next_step: from the fault to the next finished step.
    """

    kind: str
    step: int
    tier: str
    steps_lost: int
    steps_recomputed: int
    exactness: str
    began: float
    injected: bool = False
    seconds_to_group_formed: float | None = None
    seconds_to_next_step: float | None = None


class Healings:
    """The faults of a run so far.

    Args:
        chain: where they are stored.
        notebook: stores them.
        injected: whether the job file injects faults; without, nobody looks for their traces.
    """

    def __init__(self, chain: Chain, notebook: Notebook, *, injected: bool) -> None:
        self.chain, self.notebook, self.injected = chain, notebook, injected
        self.stored = sorted(chain.events("healing-").items())
        self._matched = {name for _, body in self.stored for name in body["firings"]}
        self.open: list[tuple[Healing, list[str]]] = []

    def begin(self, kind: str, step: int, tier: str, exactness: str) -> Healing:
        """Begin the account of a fault; one that struck while another was being healed without a trace joins it."""
        kind, step, began, firings = self._match(kind, step)
        unformed = [healing for healing, _ in self.open if healing.seconds_to_group_formed is None]
        if unformed and not firings:
            unformed[-1].tier = tier
            return unformed[-1]
        healing = Healing(kind, step, tier, 0, 0, exactness, began, injected=bool(firings))
        self.open.append((healing, firings))
        return healing

    def _match(self, kind: str, step: int) -> tuple[str, int, float, list[str]]:
        """Return (kind, step, wall time, firings) of what just happened: the injected fault if one has just fired."""
        firings = self._firings()
        fired = {
            name: body
            for name, body in firings.items()
            if name not in self._matched and (kind not in STRIKES or body["kind"] in STRIKES[kind])
        }
        if not fired:
            return kind, step, clock.wall(), []
        self._matched |= set(fired)
        last = max(fired.values(), key=lambda body: float(body["wall"]))
        return str(last["kind"]), int(last["step"]), float(last["wall"]), sorted(fired)

    def _firings(self) -> dict[str, dict[str, Any]]:
        if not self.injected:
            return {}
        try:
            return self.chain.events("fault-")
        except StoreError:  # the fault is healed all the same; it is only not recognised as one that was asked for
            return {}

    def formed(self) -> None:
        """The group stands again."""
        for healing, _ in self.open:
            if healing.seconds_to_group_formed is None:
                healing.seconds_to_group_formed = clock.wall() - healing.began

    def close(self, step_after: Callable[[float], float | None]) -> list[Healing]:
        """Close, store and return the accounts after which a step was finished.

        Args:
            step_after: when the first step after a moment was finished, by the wall clock; None if none was.
        """
        closed = []
        for healing, firings in self.open:
            if healing.seconds_to_group_formed is None:
                continue
            pause = 0.0 if healing.kind in WITHOUT_PAUSE else healing.seconds_to_group_formed
            wall = step_after(healing.began + pause)
            if wall is not None:
                healing.seconds_to_next_step = wall - healing.began
                closed.append((healing, firings))
        for item in closed:
            self._store(*item)
        return [healing for healing, _ in closed]

    def close_all(self) -> None:
        """Store what is still open: the run has ended before another step was needed."""
        for item in list(self.open):
            self._store(*item)

    def _store(self, healing: Healing, firings: list[str]) -> None:
        name, body = f"healing-{len(self.stored):04d}", {**asdict(healing), "firings": firings}
        self.notebook.event(name, body)
        self.stored.append((name, body))
        self.open = [item for item in self.open if item[0] is not healing]

    def table(self) -> list[dict[str, Any]]:
        """Return every fault of the run, oldest first."""
        rows = [body for _, body in self.stored] + [asdict(healing) for healing, _ in self.open]
        hidden = ("firings", "began", "injected")
        return [{key: value for key, value in row.items() if key not in hidden} for row in rows]
