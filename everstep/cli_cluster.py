"""The commands `everstep submit`, `follow` and `stop`: a run in a Ray cluster, from this machine or from any other.

With `--address`, a command runs on the cluster, as a Ray job; this process shows what it writes and ends as it did.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep import console
from everstep.cli_shared import F, fault_option, json_option, resume_command, seen_through, set_option
from everstep.core import clock
from everstep.core.errors import ClusterGone, Failure, RunFailed, SettingsError, UserError

if TYPE_CHECKING:
    from everstep.actors.jobs import Jobs, Outcome
    from everstep.platform.settings import JobSettings

INTERRUPTED = 130
START_S = 300.0
BLIP_S = 30.0  # how long a head may be silent before a job on it is given up
NEW_HEAD_S = 900.0  # how long a retry waits for a head to be there again
LOOK_S = 1.0
FINAL = frozenset({"UserCodeFailed", "Fenced"})  # errors with exit code 1 that would only come again


def address_option(*, required: bool) -> Callable[[F], F]:
    """Return what adds `--address`."""
    said = "The cluster's dashboard, as in http://10.0.0.4:8265."
    here = "" if required else " Without it: the cluster in RAY_ADDRESS, or one on this machine."

    def add(command: F) -> F:
        return click.option("--address", metavar="URL", required=required, help=said + here)(command)

    return add


@click.command()
@click.argument("job", metavar="JOB.toml")
@address_option(required=True)
@click.option("--follow", "following", is_flag=True, help="Show the run until it ends. Ctrl-C stops it.")
@click.option(
    "--retries", type=click.IntRange(0), default=0, metavar="N",
    help="Follow, and submit up to N times again if the head dies or something else breaks.",
)  # fmt: skip
@click.option(
    "--start-timeout", type=click.FloatRange(1), default=START_S, show_default=True, metavar="SECONDS",
    help="How long the job may wait for its start.",
)  # fmt: skip
@set_option
@fault_option
@json_option
def submit(
    job: str, address: str, following: bool, retries: int, start_timeout: float,
    overrides: tuple[str, ...], faults: tuple[str, ...], as_json: bool,
) -> dict[str, Any]:  # fmt: skip
    """Start the run that JOB.toml describes on a Ray cluster.

    The current folder is shipped, less what .gitignore names. The run belongs to the cluster: it goes on without this
    command and without its job.
    """
    from everstep.actors.jobs import Jobs
    from everstep.platform.settings import load, named

    settings = named(load(job, overrides, faults), job)
    _refuse_near_stores(settings)
    words = ["train", _inside(job), *_often("--set", overrides), "--set", f"run.name={settings.run.name}"]
    words += [*_often("--fault", faults), "--json"]
    jobs = Jobs(address)
    errand = _Errand(jobs, words, settings.run.name or "", start_timeout, Path.cwd(), words[1])
    again = shlex.join(["everstep", "submit", job, "--address", jobs.address, *_often("--set", overrides)])
    errand.again = f"{again} --set run.name={errand.run}"
    if jobs.note:
        console.note(jobs.note)
    errand.submit()
    facts = {"run": errand.run, "address": jobs.address, "submission_id": errand.job}
    console.note(f"run {errand.run} is submitted as {errand.job}")
    if not (following or retries):
        for verb in ("follow", "stop"):
            console.note(f"{verb}: everstep {verb} {errand.run} --address {jobs.address}")
        return facts
    return facts | errand.see_through(as_json, retries)


@click.command()
@click.argument("run", metavar="RUN")
@address_option(required=False)
@json_option
def follow(run: str, address: str | None, as_json: bool) -> dict[str, Any]:
    """Show RUN, which somebody started on a cluster, until it ends. Ctrl-C only ends the showing."""
    if url := _elsewhere(address):
        return _there(url, "follow", run, as_json)
    from everstep.actors.run import join

    handle = join(run)
    return seen_through(handle, handle.settings, as_json, leave=True)


@click.command()
@click.argument("run", metavar="RUN")
@address_option(required=False)
@json_option
def stop(run: str, address: str | None, as_json: bool) -> dict[str, Any]:
    """Stop RUN after its step in flight, and wait until all is durable and its actors are gone."""
    if url := _elsewhere(address):
        return _there(url, "stop", run, as_json)
    from everstep.actors.run import join

    handle = join(run)
    handle.stop()
    console.note("stopping after this step ...")
    summary = seen_through(handle, handle.settings, as_json, leave=True)
    if summary.pop("interrupted") and "state" not in summary:
        return summary | {"interrupted": True}  # by Ctrl-C here; the run stops all the same
    if left := handle.left():
        raise Failure(
            f"run {run} has ended, but {len(left)} of its actors are still there: {', '.join(left)}",
            hint="look at them with: ray list actors",
        )
    return summary | {"resume": resume_command(handle.settings)}


@click.command()
@click.argument("run", metavar="RUN")
@click.argument("workers", metavar="N|MIN:MAX")
@address_option(required=False)
@json_option
def scale(run: str, workers: str, address: str | None, as_json: bool) -> dict[str, Any]:
    """Have RUN train with N workers, or MIN to MAX, from the next border on.

    It goes on without a restart: newcomers catch up first, those that leave hand over what they had not sent. The job
    file's bounds hold again when the run is resumed.
    """
    least, colon, most = workers.partition(":")
    if not all(part.isdecimal() and int(part) for part in (least, most if colon else least)):
        raise UserError(f"{workers}: expected N or MIN:MAX, whole numbers from 1 on", hint=f"everstep scale {run} 1:4")
    bounds = int(least), int(most if colon else least)
    if url := _elsewhere(address):
        return _there(url, "scale", run, as_json, workers)
    from everstep.actors.run import join

    handle = join(run)
    slices = handle.settings.batch.micro_shards
    if not bounds[0] <= bounds[1] <= slices:
        raise UserError(
            f"{workers}: expected 1 <= MIN <= MAX <= {slices}: a step has {slices} micro-shards, one a worker",
            hint=f"everstep scale {run} {min(bounds)}:{min(max(bounds), slices)}",
        )
    handle.scale(*bounds)
    if not as_json:
        console.note(f"run {run} is to train with {workers} workers; see it with: everstep follow {run}")
    return {"run": run, "min": bounds[0], "max": bounds[1]}


def _elsewhere(address: str | None) -> str | None:
    """Return the dashboard to go through, if the command is to run on the cluster; make ready to join one if not."""
    here = os.environ.get("RAY_ADDRESS", "")
    if address or here.startswith(("http://", "https://")):
        return address or here
    if "everstep.actors.environment" not in sys.modules:  # which decides by this how this process talks to others
        os.environ.setdefault("RAY_ADDRESS", "auto")
    return None


def _there(address: str, verb: str, run: str, as_json: bool, *more: str) -> dict[str, Any]:
    from everstep.actors.jobs import Jobs

    errand = _Errand(Jobs(address), [verb, run, *more, "--json"], run, START_S)
    errand.submit()
    return errand.see_through(as_json, 0)


def _often(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _inside(job: str) -> str:
    """Return the job file's path as it will be in the shipped folder."""
    path, here = Path(job).resolve(), Path.cwd().resolve()
    if here not in path.parents:
        raise UserError(
            f"{job} is outside of {here}, and only that folder is shipped",
            hint=f"cd {path.parent}, and submit from there",
        )
    return path.relative_to(here).as_posix()


def _refuse_near_stores(settings: JobSettings) -> None:
    """Refuse a store that the cluster would not find again."""
    url = settings.run.store
    scheme, _, path = url.partition(":")
    if scheme == "memory" or (scheme == "file" and not os.path.isabs(path)):
        where = "lives in one process" if scheme == "memory" else "would lie in the job's temporary folder"
        raise SettingsError(
            f"run.store {url!r} {where} on the cluster, and be lost with it",
            hint="--set run.store=s3://bucket/prefix, or --set run.store=file:/shared/folder that every node sees",
        )


class _Errand:
    """One everstep command on a cluster, seen through to its end.

    Args:
        jobs: the cluster's job server.
        words: the command.
        run: the run's name.
        start_s: how long it may wait for its start.
        folder: what it needs there.
        needed: the file in it that must be there.
    """

    def __init__(
        self, jobs: Jobs, words: Sequence[str], run: str, start_s: float, folder: Path | None = None, needed: str = ""
    ) -> None:
        self.jobs, self.words, self.run = jobs, words, run
        self.job = self.again = ""
        self._start_s, self._folder, self._needed = start_s, folder, needed

    def submit(self) -> None:
        """Have the cluster run it."""
        self.job = self.jobs.submit(self.words, self.run, self._folder, self._needed)

    def see_through(self, as_json: bool, retries: int) -> dict[str, Any]:
        """Show what it writes until it ends, and return its answer; what broke is tried again so often."""
        for left in range(retries, -1, -1):
            try:
                outcome, answer, asked = self._watched(BLIP_S if left == 0 else NEW_HEAD_S)
                what = outcome.message or str(answer.get("error", {}).get("message", "something broke"))
                kind = answer.get("error", {}).get("class")
                if kind == "RunDone" and left < retries:
                    console.note(f"run {self.run} had ended before; see it with: everstep chain ls {self.run}")
                    return {"state": "done", "exit_code": 0}
                if outcome.code != 1 or asked or left == 0 or kind in FINAL:
                    return self._answer(outcome, answer, as_json)
            except _JobLost as lost:
                what = lost.message
                if left == 0:
                    raise
            console.note(f"{what}; submitting again, {left} {'try' if left == 1 else 'tries'} left")
            self._submit_when_possible()
        raise AssertionError("the last try returns or raises")

    def _answer(self, outcome: Outcome, answer: dict[str, Any], as_json: bool) -> dict[str, Any]:
        if outcome.message and "error" not in answer:
            raise RunFailed(
                outcome.message,
                hint=f"the run may go on without it: everstep follow {self.run} --address {self.jobs.address}"
                + (f"; if nobody runs it: {self.again}" if self.again else ""),
            )
        if not as_json and "digest" in answer:
            console.summary({key: value for key, value in answer.items() if key != "resume"})
        if self.again and answer.get("state") == "stopped":
            console.note(f"or on this cluster: {self.again}")
        return answer | ({"interrupted": True} if outcome.code == INTERRUPTED else {"exit_code": outcome.code})

    def _watched(self, patience_s: float) -> tuple[Outcome, dict[str, Any], bool]:
        """Show the job until it ends, over whatever time its head is silent; the first Ctrl-C asks it to stop."""
        from everstep.actors.jobs import Output

        output = Output()
        with console.interrupts() as pressed:
            seen, asked = 0, False
            while True:
                try:
                    for part in self.jobs.watch(self.job, self._start_s, seen):
                        if isinstance(part, str):
                            seen += len(part)
                            _show(output.feed(part))
                        else:
                            _show(output.close())
                            return part, output.answer, asked
                        if pressed.asked and not asked:
                            asked = True
                            console.note("Ctrl-C: passed on to the cluster ... (Ctrl-C again gives up at once)")
                            self.jobs.stop(self.job)
                except ClusterGone as gone:
                    self._wait_for_head(gone, patience_s)

    def _wait_for_head(self, gone: ClusterGone, patience_s: float) -> None:
        """Wait for the head to answer again and to know the job."""
        console.note(f"{gone.message}; waiting up to {patience_s:g} s for it")
        deadline = clock.monotonic() + patience_s
        while not self.jobs.answers():
            if clock.monotonic() > deadline:
                hint = f"when it is there again: {self.again or 'try again'}; what is in the store is safe"
                raise ClusterGone(gone.message, hint=hint)
            clock.sleep(LOOK_S)
        if not self.jobs.knows(self.job):
            hint = f"go on with: {self.again}" if self.again else "resume the run"
            raise _JobLost(f"the head at {self.jobs.address} is a new one and knows no job {self.job}", hint=hint)

    def _submit_when_possible(self) -> None:
        deadline = clock.monotonic() + NEW_HEAD_S
        while True:
            with contextlib.suppress(ClusterGone):
                return self.submit()
            if clock.monotonic() > deadline:
                raise ClusterGone(f"the head at {self.jobs.address} takes no job", hint=f"later: {self.again}")
            clock.sleep(LOOK_S)


class _JobLost(ClusterGone):
    """The head that ran the job is gone."""


def _show(lines: Sequence[str]) -> None:
    for line in lines:
        console.note(line)
