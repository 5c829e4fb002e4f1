"""How a controller's decisions are carried out on Ray: the verbs of `platform.controller.Mechanism`."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from everstep.actors import adoption, closing, recovery, roster
from everstep.actors.context import RunContext
from everstep.actors.environment import ray
from everstep.actors.healing import Healing
from everstep.actors.metrics import Metrics
from everstep.actors.spec import how_of, key_id_of, store_of
from everstep.core import clock
from everstep.core.errors import GroupBroken, StoreError
from everstep.platform.states import Ask, Facts, Prepare, Regroup, ReplaceCheckpointers, Scaling
from everstep.storage.chain import Chain
from everstep.training.history import evaluation_name, evaluations, rewind_name

LOOK_S = 0.1
FAREWELL_S = 5.0


class Mechanism:
    """Starts, watches, heals and ends one run.

    Args:
        run: the run; its log is opened by `start`.
    """

    def __init__(self, run: RunContext) -> None:
        self.run = run
        host = "0.0.0.0" if os.environ.get("RAY_ADDRESS") else "127.0.0.1"
        self._rendezvous: Any = dist.TCPStore(host, 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.address = (str(ray.util.get_node_ip_address()), int(self._rendezvous.port))
        self.summary: dict[str, Any] | None = None
        self.stop_asked = False
        self._pausing = False
        self._found_dead = False  # the run neither ended nor was stopped: all that ran it is gone
        self._started = clock.monotonic()
        self._metrics = Metrics(run)

    def start(self) -> None:
        """Begin or take over the log and set the workers running; or find a run that is alive, and go on with it."""
        run, store = self.run, store_of(self.run.settings)
        found = adoption.find(run.name)
        if found.workers and Chain.exists(store, run.name):
            run.open_log(Chain.open(store, run.name))
        if found and adoption.adopt(run, found):
            self.regroup(Regroup("the fault handler was restarted", "fault_handler_lost", size=self.run.scaling.target))
            return
        run.open_log(self._begin_log(store))
        self._start_actors()

    def observe(self) -> Facts:
        """Look at everybody, waiting a moment for something to happen."""
        run, crew = self.run, self.run.crew
        crew.look(LOOK_S)
        crew.newcomers.look()
        run.checkpointers.look()
        self._account()
        run.bookkeeper.look()
        self._metrics.look()
        if self._pausing or self.stop_asked:
            crew.pause(run.group_epoch)
        step_s = crew.latest.get("step_s")
        return Facts(
            crew.facts(),
            run.checkpointers.facts(),
            clock.monotonic() - crew.last_progress,
            crew.newcomers.facts(),
            pausing=self._pausing,
            stop_asked=self.stop_asked,
            left_s=step_s * (run.settings.run.steps - run.lsn()) if step_s else None,
        )

    def stop(self) -> None:
        """Ask the workers to stop after the same step."""
        self.stop_asked = True
        self.run.crew.pause(self.run.group_epoch)

    def resize(self, decision: Scaling) -> None:
        """Begin what a scaling decision asks for."""
        newcomers = self.run.crew.newcomers
        if isinstance(decision, Ask):
            newcomers.ask(decision.count)
        elif isinstance(decision, Prepare):
            newcomers.prepare(decision.count, self.run.checkpointers.actors)
        else:
            self._pausing = True
            self.run.crew.pause(self.run.group_epoch)

    def regroup(self, decision: Regroup) -> None:
        """Form the group anew: survivors go on, newcomers join or take the places of the lost, all get one state."""
        run, crew = self.run, self.run.crew
        crew.end_epoch(run.group_epoch, decision.kill)
        self._pausing = False
        run.group_epoch += 1
        run.ensure_checkpointers()
        survivors = [m for m in crew.members if m.result is not None and m.result.outcome != "dead"]
        whole = [m for m in survivors if m.result is not None and m.result.lsn >= 0]  # those with the run's state
        lost = len(survivors) < len(crew.members)
        finished = run.lsn()
        healing = self._healing(decision, "survivor" if whole else "replica")
        if whole:
            leaving = any(member.identity in decision.leave for member in whole)
            recovery.complete_log(run, whole, max(m.lsn for m in whole), flush=lost or leaving)
        roster.fill(run, decision, survivors, lambda: self.stop_asked)
        if whole and lost and run.recipe.keeps_residual and run.recipe.residual == "survivor":
            run.become("warm")  # a residual of one's own dies with its worker
        if healing is not None:
            healing.exactness = run.exactness
        if not whole:
            known = max(finished, healing.step - 1) if healing and healing.injected else finished
            recovery.load_state(run, healing, known, how_of(run.settings))
        self._form()

    def _healing(self, decision: Regroup, tier: str) -> Healing | None:
        """Open the account of what was lost; None: nothing was."""
        if decision.kind == "resize":
            return None
        self._metrics.recovered()
        return self.run.healings.begin(decision.kind, self.run.lsn() + 1, tier, self.run.exactness)

    def replace_checkpointers(self, decision: ReplaceCheckpointers) -> None:
        """Take the log over with new checkpoint actors; training goes on, workers resend what is not durable."""
        self.run.replace_checkpointers()
        for member in self.run.crew.members:
            if member.actor is not None:
                member.actor.connect_checkpointers.remote(self.run.checkpointers.actors)
        self.run.crew.last_progress = clock.monotonic()  # nobody looked meanwhile

    def finish(self, *, stopped: bool) -> None:
        """Make everything durable, close the log, make the summary."""
        run = self.run
        digest, durable = closing.close_log(run, stopped=stopped)
        self._account()
        run.healings.close_all()
        closing.write_down(run)
        summary = run.patiently(lambda: closing.summarise(run, digest, durable, clock.monotonic() - self._started))
        run.patiently(lambda: run.chain.add_event(f"summary-{run.chain.manifest.version:06d}", summary))
        self.summary = summary

    def save_what_is_left(self) -> None:
        """Best effort on the way out of a failed run: every finished step that can still be had goes into the store."""
        run = self.run
        if not run.checkpointers.actors:
            return
        try:
            have = run.checkpointers.begin_epoch(run.group_epoch, None)
            for member in run.crew.members:
                if member.result is not None and member.result.outcome != "dead":
                    have = run.crew.ask(member, "resend", run.group_epoch, have)
            run.checkpointers.ask("advance", min(have.values()))
            run.checkpointers.ask("flush", FAREWELL_S)
        except Exception as error:  # best effort: what ended the run is what has to be told
            run.tell(f"the last finished steps could not be saved: {str(error).splitlines()[0]}")

    def close(self) -> None:
        """End all actors."""
        self.run.crew.close()
        self.run.checkpointers.close()

    def _begin_log(self, store: Any) -> Chain:
        run = self.run
        if run.spec.resume is not None or Chain.exists(store, run.name):
            return self._resumed(store)
        shards = run.spec.shards + 1 if run.checkpointers else 0
        return Chain.create(
            store, run.name, settings=run.spec.settings, shards=shards, exactness=run.spec.exactness,
            key_id=key_id_of(run.settings),
        )  # fmt: skip

    def _resumed(self, store: Any) -> Chain:
        run = self.run
        before = Chain.open(store, run.name).manifest
        left = before.state in ("open", "claim") and not before.never_begun
        self._found_dead = left and run.spec.at is None
        chain = Chain.take_over(store, run.name, cut="common", at=run.spec.at, settings=run.spec.settings)
        if run.spec.at is not None:
            skipped = sum(count for after, count in run.settings.batch.skips if after == run.spec.at)
            body = {"generation": chain.manifest.generation, "step": run.spec.at, "skipped_batches": skipped}
            chain.add_event(rewind_name(chain.manifest.generation), body)
        return chain

    def _start_actors(self) -> None:
        run, crew, workers = self.run, self.run.crew, self.run.settings.workers
        if self.run.scaling.target < workers.max:
            run.tell(
                f"workers.max = {workers.max} is no faster than {self.run.scaling.target}: a step has "
                f"{run.settings.batch.micro_shards} micro-shards"
            )
        run.checkpointers.start(run.chain, run.group_epoch)
        crew.newcomers.ask(self.run.scaling.target + workers.spares)
        crew.members = roster.first(run, self.run.scaling.target, lambda: self.stop_asked)
        healing = run.healings.begin("cluster_lost", 0, "store", run.exactness) if self._found_dead else None
        finished = healing.step - 1 if healing and healing.injected else 0
        recovery.load_state(run, healing, finished, run.spec.resume or "resume")
        self._form()

    def _form(self) -> None:
        run = self.run
        answers = run.crew.form(run.group_epoch, self.address, run.checkpointers.actors)
        run.healings.formed()
        lsn = answers[0].lsn
        if any(answer.drifted for answer in answers):
            run.tell(f"step {lsn}: a worker's state differed from world rank 0's and was replaced")
        if answers[0].note:
            run.tell(answers[0].note)
        run.formed(lsn, len(answers))
        every = run.settings.eval.every
        due = bool(every and lsn and lsn % every == 0 and not self._evaluated(lsn))
        run.crew.run(run.settings.run.steps, due)

    def _evaluated(self, lsn: int) -> bool:
        try:
            chain = self.run.chain
            return bool(evaluations(chain.events(evaluation_name(lsn)) | chain.events("rewound-")))
        except StoreError:
            return False  # then it is done once more; the first answer stays

    def _account(self) -> None:
        """Close the account of faults once a step was finished after them."""
        crew, healings = self.run.crew, self.run.healings
        try:
            closed = healings.close(lambda wall: crew.ask(crew.members[0], "step_after", wall))
        except GroupBroken:  # seen by the next look, and healed first
            return
        for healing in closed:
            self.run.tell(
                f"{healing.kind} at step {healing.step}: healed from the {healing.tier}, "
                f"{healing.steps_lost} steps lost, next step after {healing.seconds_to_next_step:.2f} s"
            )
