"""The fault handler: a detached actor that owns a run. It carries out what the controller decides.

It hosts the rendezvous store, so that no worker's death takes it away, and it alone writes manifests. Killed, it is
started again by Ray, finds the living actors by their names and takes them into a new group epoch.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everstep.actors import environment  # noqa: F401  # before ray
import ray  # isort: skip

import torch.distributed as dist

from everstep.actors.checkpointers import Checkpointers, lowest_durable, merged
from everstep.actors.crew import Crew, Member
from everstep.actors.healing import Healing, Healings
from everstep.actors.spec import NAMESPACE, WorkerSpec, actor_name, recipe_of, spread
from everstep.core import clock
from everstep.core.errors import EverstepError, GroupBroken, RunFailed, StateMismatch, StoreError
from everstep.platform.controller import Controller
from everstep.platform.policies import FailurePolicy
from everstep.platform.settings import JobSettings, from_dict
from everstep.platform.states import Ended, Facts, Regroup, ReplaceCheckpointers, name_of
from everstep.platform.tuner import Intervals
from everstep.storage.chain import Chain
from everstep.storage.keys import BaseKey, CompressorKey, SegmentKey
from everstep.storage.manifest import CompressorSnapshot
from everstep.storage.store import open_store
from everstep.training.restore import best_snapshot
from everstep.training.state import combine_digests

LOOK_S = 0.1


@dataclass(frozen=True)
class RunSpec:
    """What a run is started from.

    Attributes:
        settings: the job file as a dictionary, complete.
        resume: None for a new run, else "resume" or "exact".
        shards: parameter shards of this model.
        exactness: what a replay of this optimizer promises.
        intervals: when segments, bases and compressor snapshots are taken.
        killable: the driver's process id, if its cluster is its own.
    """

    settings: Mapping[str, Any]
    resume: str | None
    shards: int
    exactness: str
    intervals: Intervals
    killable: int | None


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, concurrency_groups={"control": 8})
class FaultHandler:
    """Owns one run.

    Args:
        spec: what to run. After a restart the store and the living actors say how far it has come.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.run = _Run(spec)
        threading.Thread(target=self.run.live, name="controller", daemon=True).start()

    @ray.method(concurrency_group="control")
    def progress(self) -> dict[str, Any]:
        """Return where the run stands."""
        return self.run.progress()

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Stop after the step that is under way, with everything durable."""
        self.run.stop()

    @ray.method(concurrency_group="control")
    def summary(self) -> dict[str, Any]:
        """Return the summary of an ended run. Raises the error that ended it."""
        return self.run.result()

    @ray.method(concurrency_group="control")
    def close(self) -> None:
        """End all actors of the run."""
        self.run.close()

    @ray.method(concurrency_group="control")
    def die(self) -> None:
        """Be killed: the fault `kill_fault_handler`."""
        os.kill(os.getpid(), signal.SIGKILL)


class _Run:
    """The mechanism behind one run's controller."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.settings: JobSettings = from_dict(dict(spec.settings))
        self.name = self.settings.run.name or ""
        actors = self.settings.checkpoint.actors
        shards = spread(spec.shards, actors) if actors else ()
        self.checkpointers = Checkpointers(self.settings, shards, spec.intervals)
        worker = WorkerSpec(spec.settings, "", shards, spec.intervals.compressor_interval if actors else 0, spec.killable)
        self.crew = Crew(self.settings, worker)
        self.rendezvous = dist.TCPStore("0.0.0.0" if os.environ.get("RAY_ADDRESS") else "127.0.0.1", 0, None, True, wait_for_workers=False)  # fmt: skip
        self.address = (ray.util.get_node_ip_address(), self.rendezvous.port)
        self.controller = Controller(self, self._policy(), self.tell)
        self.group_epoch = 0
        self.world_sizes: list[int] = []
        self.exactness = spec.exactness
        self.lines: list[str] = []
        self.ended: Ended | None = None
        self.summary: dict[str, Any] | None = None
        self.chain: Chain
        self.healings: Healings
        self._stop_asked = False
        self._started = clock.monotonic()

    def _policy(self) -> FailurePolicy:
        check = self.settings.checkpoint
        return FailurePolicy(
            hang_timeout_s=self.settings.workers.hang_timeout_s, storage_timeout_s=check.storage_timeout_s,
            stop_on_storage_loss=check.on_storage_loss == "stop",
        )  # fmt: skip

    # ---- what others ask ----

    def live(self) -> None:
        """Run to the end; nothing escapes."""
        try:
            self.ended = self.controller.run()
        except BaseException as error:  # a defect: shown to whoever asks for the summary, whole
            self.ended = Ended(RunFailed(f"{type(error).__name__}: {error}", hint="this is a defect of everstep"))
            raise
        finally:
            if self.ended is not None and self.ended.error is not None:
                self._save_what_is_left()

    def progress(self) -> dict[str, Any]:
        """Return where the run stands."""
        latest = self.crew.latest
        step_s = latest.get("step_s")
        return {
            "state": name_of(self.ended or self.controller.state),
            "lsn": max((member.lsn for member in self.crew.members), default=0),
            "steps": self.settings.run.steps,
            "loss": latest.get("loss"),
            "steps_per_s": 1 / step_s if step_s else None,
            "world_size": len(self.crew.members),
            "complete_lsn": self.checkpointers.lowest("received"),
            "durable_lsn": self.checkpointers.lowest("durable"),
            "message": self.lines[-1] if self.lines else "",
            "events": list(self.lines),
        }

    def stop(self) -> None:
        """Ask the workers to stop after the same step."""
        self._stop_asked = True
        for member in self.crew.members:
            member.actor.request_stop.remote()

    def result(self) -> dict[str, Any]:
        """Return the summary, or raise what ended the run."""
        if self.ended is not None and self.ended.error is not None:
            raise self.ended.error
        assert self.summary is not None, "asked for the summary of a run that has not ended"
        return self.summary

    def close(self) -> None:
        """End all actors."""
        self.crew.close()
        self.checkpointers.close()

    def tell(self, line: str) -> None:
        """Keep one notable line for whoever follows."""
        self.lines.append(line)

    # ---- the controller's verbs ----

    def start(self) -> None:
        """Begin or take over the log and set the workers running; or find a run that is alive, and go on with it."""
        store = open_store(self.settings.run.store)
        living = _living(self.name)
        if self.spec.resume is None and not living and self.name not in Chain.runs(store):
            shards = self.spec.shards + 1 if self.checkpointers else 0
            self.chain = Chain.create(
                store, self.name, settings=self.spec.settings, shards=shards, exactness=self.spec.exactness
            )
        elif living:
            self.chain = Chain.open(store, self.name)
        else:
            self.chain = Chain.take_over(store, self.name, cut="common", settings=self.spec.settings)
        self.healings = Healings(self.chain)
        self.exactness = self.chain.manifest.exactness
        if living and self._adopt(living):
            return
        self._start_actors()

    def observe(self) -> Facts:
        """Look at everybody, waiting a moment for something to happen."""
        self.crew.look(LOOK_S)
        self.checkpointers.look()
        self._account()
        self._name_snapshots()
        if self._stop_asked:
            self.stop()
        return Facts(self.crew.facts(), self.checkpointers.facts(), clock.monotonic() - self.crew.last_progress)

    def regroup(self, decision: Regroup) -> None:
        """Form the group anew: survivors go on, spares take the places of the lost, everybody gets the highest state."""
        self.crew.end_epoch(self.group_epoch, decision.kill)
        self.group_epoch += 1
        survivors = [m for m in self.crew.members if m.result is not None and m.result.outcome != "dead"]
        whole = [m for m in survivors if m.result is not None and m.result.lsn >= 0]  # those with the run's state
        top = max((m.lsn for m in whole), default=-1)
        finished = max(m.lsn for m in self.crew.members)
        kind, step, began, firings = self.healings.match(decision.kind, finished + 1)
        finished = max(finished, step - 1) if firings else finished
        if whole:
            self._complete_log(whole, top)
            healing = Healing(kind, step, "survivor", 0, 0, self.exactness, began)
        else:
            healing = Healing(kind, step, "replica", 0, 0, self.exactness, began)
        self.healings.add(healing, firings)
        lost = [place for place, m in enumerate(self.crew.members) if m not in survivors]
        for place in lost:
            self.crew.members[place] = self.crew.replacement()
        if not whole:
            self._load(healing, finished, self.settings.checkpoint.on_total_loss)
        self._form()
        self.crew.fill_spares()

    def replace_checkpointers(self, decision: ReplaceCheckpointers) -> None:
        """Take the log over with new checkpoint actors; training goes on, workers resend what is not durable."""
        kind, step, began, firings = self.healings.match("checkpointer_lost", self._lsn() + 1)
        self._renew_checkpointers()
        healing = Healing(kind, step, "store", 0, 0, self.exactness, began)
        self.healings.add(healing, firings)
        self.healings.formed()
        self._connect_workers()

    def finish(self, *, stopped: bool) -> None:
        """Make everything durable, compare live and merged state, close the log."""
        last = self._lsn()
        digest = self._live_digest()
        durable = self._make_durable(last) if self.checkpointers else 0
        if self.checkpointers:
            self._compare_replica(last, digest)
        self._account(force=True)
        closing = {"last_lsn": last, "digest": digest, "exactness": self.exactness}
        if stopped and last < self.settings.run.steps:
            self.tell(f"stopped after step {last}; durable up to step {durable}")
        elif self.checkpointers:
            self.chain.update(state="closed", closing=closing, exactness=self.exactness)
        self.summary = self._summarise(last, digest, durable)

    # ---- starting ----

    def _start_actors(self) -> None:
        size = self.settings.workers.size
        members = [self.crew.make() for _ in range(size)]
        if self.checkpointers:
            self.checkpointers.start(self.chain, self.group_epoch)
        self.crew.fill_spares()
        for member in members:
            self._greet(member)
        self.crew.members = members
        began = clock.wall()
        kind, step, fault_wall, firings = self.healings.match("cluster_lost", 0)
        healing = Healing(kind, step, "store", 0, 0, self.exactness, fault_wall if firings else began)
        resumed = self.chain.manifest.generation > 1
        self._load(healing, step - 1 if firings else 0, self.spec.resume or "resume")
        if resumed:
            self.healings.add(healing, firings)
        self._form()

    def _greet(self, member: Member) -> None:
        try:
            self.crew.greet(member)
        except ray.exceptions.RayActorError as error:
            cause = getattr(error, "cause", None)
            raise RunFailed(f"a worker could not be built: {error}", hint="see the message above") from cause
        except ray.exceptions.GetTimeoutError as error:
            workers = self.settings.workers
            raise RunFailed(
                f"workers did not start: Ray has no room for {workers.size} workers of {workers.cpus:g} CPUs and "
                f"{workers.gpus:g} GPUs",
                hint="look at `ray status`; add nodes or lower workers.max",
            ) from error

    def _adopt(self, living: Mapping[str, list[Any]]) -> bool:
        """Take living actors into a new group epoch; False if there are not enough of them to go on from."""
        found = []
        for actor in living["worker"]:
            try:
                found.append((ray.get(actor.status.remote(), timeout=5), actor))
            except ray.exceptions.RayError:
                continue
        placed = {s["world_rank"]: (s, a) for s, a in found if s["world_rank"] is not None}
        if not placed:
            return False
        self.group_epoch = max(status["group_epoch"] for status, _ in found)
        for place in range(self.settings.workers.size):
            self.crew.members.append(_member(*placed[place]) if place in placed else Member("lost", None))
        self.crew.spares = [_member(s, a) for s, a in found if s["world_rank"] is None]
        self.tell(f"the fault handler was restarted and found {len(placed)} workers alive")
        for member in self.crew.members:
            if member.actor is not None:
                member.actor.end_epoch.remote(self.group_epoch)
        # A call of the old fault handler may still be running; workers take ours once it has come out.
        for member in self.crew.members:
            if member.actor is not None:
                member.run = member.actor.run.remote(0, False)
            else:
                member.actor, member.result = None, None
        self._adopt_checkpointers(living["checkpointer"])
        self.crew.last_progress = clock.monotonic()
        self._regroup_adopted()
        return True

    def _adopt_checkpointers(self, actors: list[Any]) -> None:
        statuses = []
        for actor in actors:
            try:
                statuses.append((ray.get(actor.status.remote(), timeout=5), actor))
            except ray.exceptions.RayError:
                continue
        mine = {s["index"]: (s, a) for s, a in statuses if s["generation"] == self.chain.manifest.generation}
        if len(mine) == len(self.checkpointers.shards):
            self.checkpointers.actors = [mine[index][1] for index in sorted(mine)]
            self.checkpointers.status = [mine[index][0] for index in sorted(mine)]
        elif self.checkpointers:
            self._renew_checkpointers()

    def _regroup_adopted(self) -> None:
        from everstep.actors.train_worker import RunResult

        for member in self.crew.members:
            if member.actor is None:
                member.result = RunResult("dead", 0)
        self.regroup(Regroup("the fault handler was restarted", "fault_handler_lost"))

    # ---- recovering ----

    def _complete_log(self, whole: list[Member], top: int) -> None:
        """Have the log hold every finished step before anybody reads a replica; from state alone if records are gone."""
        if not self.checkpointers:
            return
        try:
            have = self.checkpointers.begin_epoch(self.group_epoch, top)
        except GroupBroken:
            self._renew_checkpointers()
            have = self.checkpointers.begin_epoch(self.group_epoch, top)
        for member in sorted(whole, key=lambda m: -m.lsn):
            if min(have.values()) >= top:
                break
            ray.get(member.actor.connect_checkpointers.remote(self.checkpointers.actors), timeout=60)
            have = self._ask(member, "resend", self.group_epoch, have)
        if min(have.values()) < top:
            self._rebase(whole, top)
        self.checkpointers.ask("advance", top)
        self.checkpointers.ask("flush", 10.0)

    def _rebase(self, whole: list[Member], top: int) -> None:
        """Nobody holds the records any more, but the state lives: start the log again from it, and say so."""
        source = next(member for member in whole if member.lsn == top)
        lsn, tensors = self._ask(source, "tensors")
        self.checkpointers.ask("rebase", lsn, tensors)
        self.tell(f"records before step {lsn} are lost with their holders; the log goes on from a base at {lsn}")

    def _load(self, healing: Healing, finished: int, how: str) -> None:
        """Give world rank 0 the state to go on from: exactly, with the residual that belongs to it, or warm."""
        if not self.checkpointers:
            if self.world_sizes:
                raise RunFailed(
                    "all workers are lost and there is no log (checkpoint.actors = 0)", hint="set checkpoint.actors = 1"
                )
            self._ask(self.crew.members[0], "begin")
            return
        have = self.checkpointers.begin_epoch(self.group_epoch, None)
        complete = min(have.values())
        self.checkpointers.ask("advance", complete)
        self.checkpointers.ask("begin_epoch", self.group_epoch, complete)
        healing.steps_lost = max(finished - complete, 0)
        residual = recipe_of(self.settings).keeps_residual
        if residual and how == "exact":
            start = self._load_exact(complete)
            healing.tier, healing.steps_recomputed = "store", complete - start
        else:
            start = complete
            self._send_state(None, None)
            if residual and complete > 0:
                healing.exactness = self.exactness = "warm"
                self.chain.update(exactness="warm")
        if start or complete:
            self.tell(f"going on from step {start} ({healing.exactness}); the log reaches step {complete}")

    def _load_exact(self, complete: int) -> int:
        """Load the state at the last compressor snapshot, and have the recomputed records compared with the logged."""
        snapshot = best_snapshot(self.chain, complete)
        generation, lsn, slices = snapshot or (0, 0, 0)
        self.checkpointers.ask("expect_recomputed", lsn)
        if snapshot is None:
            self._send_state(0, None)
            return 0
        parts = ray.get(self.checkpointers.actors[0].residual.remote(generation, lsn, range(slices)))
        if self.settings.compression.residual == "replicated":
            import numpy as np

            self._send_state(lsn, np.concatenate([parts[number] for number in range(slices)]))
            return lsn
        if slices != len(self.crew.members):
            raise RunFailed(
                f"the compressor snapshot at step {lsn} is of {slices} workers, there are {len(self.crew.members)}",
                hint="resume with the world size of the snapshot, or without --exact (warm)",
            )
        for place, member in enumerate(self.crew.members):
            self._ask(member, "load_residual", lsn, parts[place])
        self._send_state(lsn, None)
        return lsn

    def _send_state(self, lsn: int | None, residual: Any) -> None:
        answers = self.checkpointers.ask("state", lsn)
        self._ask(self.crew.members[0], "load", answers[0][0], [tensors for _, tensors in answers], residual)

    def _renew_checkpointers(self) -> None:
        """Take the log over as a new generation, with new checkpoint actors."""
        self.chain = Chain.take_over(self.chain.store, self.name, cut="each")
        self.healings.chain = self.chain
        self.checkpointers.replace(self.chain, self.group_epoch)
        self.checkpointers.ask("status")

    def _connect_workers(self) -> None:
        for member in self.crew.members:
            member.actor.connect_checkpointers.remote(self.checkpointers.actors)

    def _form(self) -> None:
        answers = self.crew.form(self.group_epoch, self.address, self.checkpointers.actors)
        self.healings.formed()
        lsn = answers[0].lsn
        if any(answer.drifted for answer in answers):
            self.tell(f"step {lsn}: a worker's state differed from world rank 0's and was replaced")
        if not self.world_sizes or self.world_sizes[-1] != len(answers):
            self.world_sizes.append(len(answers))
        every = self.settings.eval.every
        due = bool(every and lsn and lsn % every == 0 and f"eval-{lsn:012d}" not in self.chain.events())
        self.crew.run(self.settings.run.steps, due)

    def _ask(self, member: Member, method: str, *arguments: Any) -> Any:
        """Call a method of a worker.

        Raises:
            GroupBroken: the worker is gone.
        """
        try:
            return ray.get(getattr(member.actor, method).remote(*arguments), timeout=120)
        except ray.exceptions.RayActorError as error:
            from everstep.actors.train_worker import RunResult

            member.result = RunResult("dead", member.lsn)
            raise GroupBroken("a worker is gone") from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error

    # ---- watching ----

    def _lsn(self) -> int:
        return max((member.lsn for member in self.crew.members), default=0)

    def _account(self, *, force: bool = False) -> None:
        """Close the account of faults once a step was finished after them."""
        if not self.healings.open:
            return
        first, last = self.crew.latest.get("first_step"), self.crew.latest.get("last_step")
        if force:
            first, last = first or clock.wall(), last or clock.wall()
        for healing in self.healings.stepped(first, last):
            self.tell(
                f"{healing.kind} at step {healing.step}: healed from the {healing.tier}, {healing.steps_lost} steps lost, "
                f"next step after {healing.seconds_to_next_step:.2f} s"
            )

    def _name_snapshots(self) -> None:
        """Name compressor snapshots in the manifest once all their slices are stored."""
        found: dict[int, set[int]] = {}
        for status in self.checkpointers.status:
            for lsn, slices in status.get("slices", {}).items():
                found.setdefault(int(lsn), set()).update(slices)
        known = {snapshot.lsn for snapshot in self.chain.manifest.compressor}
        size = self.settings.workers.size
        fresh = [lsn for lsn, slices in sorted(found.items()) if len(slices) == size and lsn not in known]
        if fresh:
            generation = self.chain.manifest.generation
            named = tuple(CompressorSnapshot(generation, lsn, size) for lsn in fresh)
            self.chain.update(compressor=self.chain.manifest.compressor + named)

    # ---- ending ----

    def _live_digest(self) -> str:
        found = {self._ask(member, "digest") for member in self.crew.members}
        if len(found) > 1 and self.exactness == "bitwise":
            raise StateMismatch(f"the workers ended with different states: {sorted(found)}", hint="report this")
        return sorted(found)[0][1]

    def _make_durable(self, last: int) -> int:
        for member in self.crew.members:
            self._ask(member, "drain")
        have = merged(self.checkpointers.ask("begin_epoch", self.group_epoch, None))
        for member in self.crew.members:
            if min(have.values()) < last:
                have = self._ask(member, "resend", self.group_epoch, have)
        if min(have.values()) < last:
            self._rebase(self.crew.members, last)
        self.checkpointers.ask("advance", last)
        limit = self.settings.checkpoint.storage_timeout_s
        durable = lowest_durable(self.checkpointers.ask("flush", limit, timeout_s=limit + 30))
        if durable < last:
            status = self.checkpointers.ask("status")
            raise StoreError(
                f"the store did not take the last records within {limit:g} s: durable {durable}, expected {last}; "
                f"{'; '.join(s['store_error'] for s in status if s['store_error'])}",
                hint="mend the store, then `everstep resume` the run",
            )
        return durable

    def _compare_replica(self, last: int, digest: str) -> None:
        digests: dict[str, str] = {}
        for lsn, part in self.checkpointers.ask("digests"):
            assert lsn == last, f"the replica is at {lsn}, the run at {last}"
            digests |= part
        if combine_digests(digests) != digest and self.exactness != "close":
            raise StateMismatch(
                f"the merged state of step {last} differs from the live one: {combine_digests(digests)[:12]}, {digest[:12]}",
                hint="everstep chain verify the run; workers and checkpoint actors may be on different processors",
            )

    def _save_what_is_left(self) -> None:
        """Best effort on the way out: what the checkpoint actors hold goes into the store."""
        try:
            self.checkpointers.ask("flush", 10.0, timeout_s=20)
        except (EverstepError, ray.exceptions.RayError):
            return

    def _summarise(self, last: int, digest: str, durable: int) -> dict[str, Any]:
        listing = self.chain.listing()
        workers = [self._ask(member, "measures") for member in self.crew.members]
        statuses = self.checkpointers.ask("status")
        first = workers[0]
        events = self.chain.events()
        evaluations = [body for name, body in sorted(events.items()) if name.startswith("eval-")]
        best = min(evaluations, key=lambda body: body["loss"], default=None)
        loss_first = first["loss_first"] if first["loss_first"] == first["loss_first"] else None
        return {
            "run": self.name,
            "steps": last,
            "generation": self.chain.manifest.generation,
            "world_sizes": self.world_sizes,
            "loss_first": loss_first,
            "loss_last": first["loss_last"],
            "digest": digest,
            "exactness": self.exactness,
            "complete_lsn": min((lsn for s in statuses for lsn in s["received"].values()), default=0),
            "durable_lsn": durable,
            "bytes_logged": listing.bytes_of(SegmentKey),
            "bytes_bases": listing.bytes_of(BaseKey),
            "bytes_compressor_state": listing.bytes_of(CompressorKey),
            "bytes_network": first["network_bytes"],
            "bytes_full_checkpoint": first["full_bytes"],
            "step_seconds_median": first["step_seconds_median"],
            "stall_fraction": max(w["stall_fraction"] for w in workers),
            "log_cpu_seconds": sum(w["sender_cpu"] for w in workers) + sum(s["cpu"] for s in statuses),
            "train_cpu_seconds": sum(w["train_cpu"] for w in workers),
            "wall_seconds": clock.monotonic() - self._started,
            "faults": self.healings.table(),
            "evaluations": evaluations,
            "best": best,
            "state": "done" if last >= self.settings.run.steps else "stopped",
        }


def _member(status: Mapping[str, Any], actor: Any) -> Member:
    return Member(status["identity"], actor, status["pid"], status["node"], lsn=status["lsn"], heard=clock.monotonic())


def _living(run: str) -> dict[str, list[Any]]:
    """Return handles of the run's workers and checkpoint actors that Ray knows by name; empty if there are none."""
    names = [item["name"] for item in ray.util.list_named_actors(all_namespaces=True) if item["namespace"] == NAMESPACE]
    out: dict[str, list[Any]] = {"worker": [], "checkpointer": []}
    for role in out:
        prefix = actor_name(run, f"{role}/")
        out[role] = [ray.get_actor(name, namespace=NAMESPACE) for name in names if name.startswith(prefix)]
    return out if out["worker"] else {}
