"""The checkpoint actors of a run as the fault handler sees them."""

from __future__ import annotations

from typing import Any

from everstep.actors.checkpoint_actor import CheckpointActor
from everstep.actors.environment import ray, start
from everstep.actors.member import Member
from everstep.actors.nodes import away_from, draining
from everstep.actors.spec import Ack, CheckpointerSpec, actor_name
from everstep.core import clock
from everstep.core.errors import GroupBroken
from everstep.platform.settings import JobSettings, to_dict
from everstep.platform.states import CheckpointerFacts
from everstep.platform.tuner import Intervals
from everstep.storage.chain import Chain

CALL_S = 120.0  # a state may have to be replayed first
LOOK_S = 0.5
SILENT_S = 5.0
PROBE_S = 1.0


class Checkpointers:
    """Makes, asks and replaces checkpoint actors.

    Args:
        settings: the job.
        shards: shard numbers by actor.
        killable: the driver's process id, where `kill_everything` may kill it.
        intervals: when segments and bases are written.
    """

    def __init__(
        self, settings: JobSettings, shards: tuple[tuple[int, ...], ...], intervals: Intervals, killable: int | None
    ) -> None:
        self.settings, self.shards, self.intervals, self.killable = settings, shards, intervals, killable
        self.actors: list[Any] = []
        self.status: list[dict[str, Any]] = [{} for _ in shards]
        self._dead: set[int] = set()
        self._asked: dict[int, tuple[Any, float]] = {}  # the open question to each, and since when
        self._looked = 0.0
        self._suspects: frozenset[str] = frozenset()  # nodes that are best avoided
        self._built: set[int] = set()  # those that have answered

    def __bool__(self) -> bool:
        return bool(self.shards)

    def make(self, chain: Chain, group_epoch: int, index: int) -> Any:
        """Start one checkpoint actor in the chain's generation; it restores its shards while it starts."""
        spec = CheckpointerSpec(
            to_dict(self.settings), index, self.shards[index], chain.manifest.generation, group_epoch,
            self.intervals,
            self.killable,
        )  # fmt: skip
        name = actor_name(chain.run, "checkpointer/", f"{index}-g{chain.manifest.generation}")
        return start(CheckpointActor, spec, name=name, scheduling_strategy=away_from(self._suspects, index))

    def start(self, chain: Chain, group_epoch: int) -> None:
        """Start all of them."""
        self.actors = [self.make(chain, group_epoch, index) for index in range(len(self.shards))]
        self.status = [{**status, "node": ""} for status in self.status]  # that of the last ones
        self._dead.clear()
        self._asked.clear()
        self._built.clear()

    def retune(self, intervals: Intervals) -> None:
        """Have them, and those that take their places, write at these intervals."""
        self.intervals = intervals
        for actor in self.actors:
            actor.retune.remote(intervals)

    def replace(self, chain: Chain, group_epoch: int) -> None:
        """Start new ones in the chain's new generation in the place of all."""
        self.close()
        self.start(chain, group_epoch)

    def ready(self, suspects: frozenset[str] = frozenset()) -> None:
        """Wait until all have restored their shards.

        Args:
            suspects: nodes that somebody else has just been lost on: Ray may believe in them for long.

        Raises:
            GroupBroken: one of them is gone, or is built and answers no more.
        """
        built = [index for index in range(len(self.actors)) if index in self._built]
        asked = {self.actors[index].status.remote(): self.status[index].get("node", "") for index in built}
        limit = PROBE_S if suspects & set(asked.values()) else self._patience()
        done, silent = ray.wait(list(asked), num_returns=len(asked), timeout=limit) if asked else ([], [])
        self._suspects = suspects | {asked[reference] for reference in silent}
        if silent:
            raise GroupBroken(f"a checkpoint actor has not answered for {limit:g} s")
        self.ask("ready")

    def ask(self, method: str, *arguments: Any, timeout_s: float = CALL_S) -> list[Any]:
        """Call a method on all of them and return the answers.

        Raises:
            GroupBroken: one of them is gone.
        """
        return self._answers([getattr(actor, method).remote(*arguments) for actor in self.actors], timeout_s)

    def ask_one(self, index: int, method: str, *arguments: Any) -> Any:
        """Call a method on one of them. Raises as `ask`."""
        return self._answers([getattr(self.actors[index], method).remote(*arguments)], CALL_S)[0]

    def _answers(self, refs: list[Any], timeout_s: float) -> list[Any]:
        try:
            return list(ray.get(refs, timeout=timeout_s))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise GroupBroken("a checkpoint actor is gone, or does not answer") from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def begin_epoch(self, group_epoch: int, keep: int | None) -> dict[int, int]:
        """Have them refuse older group epochs; return the last lsn received of every shard."""
        return merged(self.ask("begin_epoch", group_epoch, keep))

    def look(self) -> None:
        """Learn how they are, twice a second."""
        now = clock.monotonic()
        if now - self._looked > LOOK_S:
            self._looked = now
            for index, actor in enumerate(self.actors):
                if index not in self._asked:
                    self._asked[index] = (actor.status.remote(), now)
        for index, (ref, _) in list(self._asked.items()):
            if not ray.wait([ref], timeout=0)[0]:
                continue
            del self._asked[index]
            try:
                self.status[index] = ray.get(ref)
                self._built.add(index)
            except ray.exceptions.RayActorError:
                self._dead.add(index)

    def facts(self) -> tuple[CheckpointerFacts, ...]:
        """Return what is known of each."""
        going, limit = draining(), clock.monotonic() - self._patience()
        silent = {index for index, (_, since) in self._asked.items() if index in self._built and since < limit}
        return tuple(
            CheckpointerFacts(
                index,
                index not in self._dead | silent,
                status.get("store_error_s"),
                status.get("store_error", ""),
                status.get("fatal"),
                leaves=status.get("node", "") in going,
            )
            for index, status in enumerate(self.status)
        )

    def _patience(self) -> float:
        """How long one that is built may leave a question open: it merges meanwhile."""
        return max(self.settings.workers.hang_timeout_s, SILENT_S)

    def lowest(self, what: str) -> int | None:
        """Return the lowest lsn over all shards of "received" or "durable", as last heard; None: not heard yet."""
        values = [lsn for status in self.status for lsn in status.get(what, {}).values()]
        return min(values, default=None)

    def close(self) -> None:
        """Kill them all, stopped ones too."""
        for index, actor in enumerate(self.actors):
            status = self.status[index] if index in self._built else {}
            Member("", actor, status.get("pid", 0), status.get("node", "")).kill()
        self.actors = []


def merged(acks: list[Ack]) -> dict[int, int]:
    """Return the last lsn received of every shard."""
    out: dict[int, int] = {}
    for ack in acks:
        out.update(ack.received)
    return out


def lowest_durable(acks: list[Ack]) -> int:
    """Return the durable lsn that these acknowledgements show."""
    return min((lsn for ack in acks for lsn in ack.durable.values()), default=0)
