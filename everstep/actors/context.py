"""What the parts of a fault handler share: one run, its actors, its log and its account."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from everstep.actors.bookkeeping import Bookkeeper
from everstep.actors.checkpointers import Checkpointers
from everstep.actors.crew import Crew
from everstep.actors.healing import Healings
from everstep.actors.notebook import Notebook
from everstep.actors.spec import WorkerSpec, recipe_of, spread
from everstep.core import clock
from everstep.core.errors import GroupBroken, StoreError
from everstep.platform.scaling import ScalingPolicy
from everstep.platform.settings import JobSettings, from_dict
from everstep.platform.tuner import Intervals
from everstep.storage.chain import Chain
from everstep.training.history import size_name, sizes
from everstep.training.recipe import Recipe

LOGGER = logging.getLogger("everstep")
STORE_RETRY_S = 0.5
EXACTNESS = ("bitwise", "close", "warm")  # from the strongest promise to the weakest
T = TypeVar("T")


@dataclass(frozen=True)
class RunSpec:
    """What a run is started from.

    Attributes:
        settings: the job file as a dictionary, complete.
        resume: None for a new run, else how to go on: see `recovery.load_state`.
        shards: parameter shards of this model.
        exactness: what a replay of this optimizer promises.
        intervals: when segments, bases and compressor snapshots are taken at first.
        snapshot_bytes: of one compressor snapshot, by all workers.
        at: resume: go back to this step; None: from the last one.
        killable: the driver's process id, if its cluster is its own.
    """

    settings: Mapping[str, Any]
    resume: str | None
    shards: int
    exactness: str
    intervals: Intervals
    snapshot_bytes: int
    killable: int | None
    at: int | None = None


@dataclass
class RunContext:
    """One run as its fault handler holds it; `chain` and `healings` are there once it has started."""

    spec: RunSpec
    settings: JobSettings
    recipe: Recipe
    crew: Crew
    checkpointers: Checkpointers
    exactness: str
    scaling: ScalingPolicy
    group_epoch: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)  # (step, world size since then), oldest first
    lines: list[str] = field(default_factory=list)
    chain: Chain = field(init=False)
    notebook: Notebook = field(init=False)
    healings: Healings = field(init=False)
    bookkeeper: Bookkeeper = field(init=False)

    @classmethod
    def of(cls, spec: RunSpec) -> RunContext:
        """Build what can be built before the log is opened."""
        settings = from_dict(dict(spec.settings))
        actors = settings.checkpoint.actors
        shards = spread(spec.shards, actors) if actors else ()
        every = spec.intervals.compressor_interval if actors else 0
        worker = WorkerSpec(spec.settings, "", shards, every, spec.killable)
        checkpointers = Checkpointers(settings, shards, spec.intervals, spec.killable)
        crew = Crew(settings, worker, lambda line: run.tell(line))
        workers = settings.workers
        scaling = ScalingPolicy(workers.min, workers.max, workers.spares, settings.batch.micro_shards)
        run = cls(spec, settings, recipe_of(settings), crew, checkpointers, spec.exactness, scaling)
        return run

    @property
    def name(self) -> str:
        """The run's name."""
        return self.settings.run.name or ""

    def open_log(self, chain: Chain) -> None:
        """Take `chain` as the run's log."""
        self.chain = chain
        self.notebook = Notebook(lambda: self.chain)
        self.healings = Healings(chain, self.notebook, injected=bool(self.settings.faults))
        self.bookkeeper = Bookkeeper(self)
        self.exactness = chain.manifest.exactness
        self.sizes = sizes(chain.events())

    def renew_checkpointers(self, cut: Literal["each", "common"] = "each") -> None:
        """Take the log over as a new generation, with new checkpoint actors in the place of all.

        `cut`: whether each shard's log goes on where it ends, or all where the shortest does.
        """
        self.chain = self.patiently(lambda: Chain.take_over(self.chain.store, self.name, cut=cut))
        self.healings.chain = self.chain
        self.checkpointers.replace(self.chain, self.group_epoch)
        self.checkpointers.ask("ready")

    def ensure_checkpointers(self) -> None:
        """Replace the checkpoint actors if one of them is gone, perhaps with the node of a worker that is."""
        lost = {m.node for m in self.crew.members if m.result is not None and m.result.outcome == "dead"} - {""}
        try:
            self.checkpointers.ready(frozenset(lost))
        except GroupBroken:
            self.replace_checkpointers()

    def replace_checkpointers(self) -> None:
        """Replace lost checkpoint actors, and keep the account of it."""
        self.healings.begin("checkpointer_lost", self.lsn() + 1, "store", self.exactness)
        self.renew_checkpointers()
        self.healings.formed()

    def become(self, exactness: str) -> None:
        """Say from now on, also in the log, that the run is no more than `close`, or `warm`: never more than it was."""
        if EXACTNESS.index(exactness) > EXACTNESS.index(self.exactness):
            self.exactness = exactness
            self.notebook.do(lambda chain: chain.update(exactness=exactness))

    def formed(self, lsn: int, size: int) -> None:
        """Note the world size from the step after `lsn` on."""
        before = self.sizes[-1][1] if self.sizes else None
        if before == size:
            return
        self.sizes.append((lsn, size))
        generation = self.chain.manifest.generation
        name = size_name(lsn, generation, self.group_epoch)
        self.notebook.event(name, {"lsn": lsn, "generation": generation, "size": size})
        if before is not None and self.settings.run.determinism == "step":
            self.become("close")
        if before is not None:
            self.tell(f"world size {before} -> {size} after step {lsn} ({self.exactness})")

    def patiently(self, act: Callable[[], T]) -> T:
        """Return what `act` returns; a store that refuses is waited for, as long as one is (storage_timeout_s).

        Raises:
            StoreError: it refused all that time.
        """
        deadline, told = clock.monotonic() + self.settings.checkpoint.storage_timeout_s, False
        while True:
            try:
                return act()
            except StoreError as error:
                if clock.monotonic() > deadline:
                    raise
                if not told:
                    self.tell(f"waiting for the store: {error.message}")
                told = True
                clock.sleep(STORE_RETRY_S)

    def lsn(self) -> int:
        """Return the highest step that any worker is known to have finished."""
        return max((member.lsn for member in self.crew.members), default=0)

    def tell(self, line: str) -> None:
        """Keep one notable line for whoever follows, and for the log of this actor."""
        LOGGER.info("run=%s group_epoch=%d lsn=%d %s", self.name, self.group_epoch, self.lsn(), line)
        self.lines.append(line)
