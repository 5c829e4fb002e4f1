"""Running everstep's commands on a cluster as Ray jobs: submit, read what they write, ask them to stop.

The job is only a driver: a run belongs to its fault handler, and goes on when its job dies. A job is stopped by SIGINT,
which for our commands is Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import queue
import shlex
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests

import everstep
from everstep.actors.environment import ray
from everstep.actors.packing import pack
from everstep.actors.session import TOKEN
from everstep.core import clock
from everstep.core.errors import ClusterGone, RunFailed, UserError
from everstep.core.ids import new_id

from ray.exceptions import AuthenticationError  # isort: skip
from ray.job_submission import JobStatus, JobSubmissionClient  # isort: skip

LEAST_RAY = (2, 60)
REACH_S = 5.0
ANSWER_S = 60.0  # for one request; an upload is one
LOOK_S = 1.0
QUIET_S = 0.2
INTERRUPTED = 130
OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Ray prefers these to the address that it is given
ENVIRONMENT = {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": "120"}
UNNOTICED = ("Running entrypoint for job ", "Runtime env is setting up.")  # Ray's own lines
TALKATIVE = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        code: the exit code of its command; 130 if it was asked to stop, 1 if it has none of its own.
        message: "", or what there is to say when the command itself could not say it.
    """

    code: int
    message: str = ""


@dataclass
class Output:
    """What a job writes: the lines to show, and the JSON object that our commands end with."""

    answer: dict[str, Any] = field(default_factory=dict)
    _rest: str = ""

    def feed(self, text: str) -> list[str]:
        """Take what came next; return the lines to show, with the object before if this was not the last."""
        *lines, self._rest = (self._rest + text).split("\n")
        return [shown for line in lines for shown in self._taken(line)]

    def close(self) -> list[str]:
        """Take the end; return the lines that are still to show."""
        return self.feed("\n") if self._rest else []

    def _taken(self, line: str) -> list[str]:
        if any(word in line for word in UNNOTICED):
            return []
        with contextlib.suppress(ValueError):
            if line.startswith("{") and isinstance(found := json.loads(line), dict):
                before, self.answer = self.answer, found
                return [json.dumps(before)] if before else []
        return [line]


class Jobs:
    """The job server of one cluster.

    Args:
        address: the URL of its dashboard, as in http://10.0.0.4:8265.

    Raises:
        UserError: this is no such URL, or not for a client like us.
        ClusterGone: nothing answers there.
    """

    def __init__(self, address: str) -> None:
        for name in TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        self.address = url_of(address)
        with _without(OVERRIDES), self._spoken():
            self._reach()
            self._client = _Client(self.address)
        version = str(getattr(self._client, "_server_ray_version", None) or ray.__version__)
        if _numbers(version) < LEAST_RAY:
            least = ".".join(map(str, LEAST_RAY))
            raise UserError(
                f"the cluster at {self.address} runs Ray {version}; everstep needs {least} or newer",
                hint=f"install Ray there as here: pip install 'ray[default]=={ray.__version__}'",
            )
        self.note = ""
        if _numbers(version) != _numbers(ray.__version__):
            self.note = f"the cluster runs Ray {version}, this machine has {ray.__version__}; the cluster's is used"

    def answers(self) -> bool:
        """Return whether the server answers now."""
        try:
            with self._spoken():
                self._reach()
                self._client.get_version()
        except ClusterGone:
            return False
        return True

    def submit(self, words: Sequence[str], run: str, folder: Path | None = None, needed: str = "") -> str:
        """Run `everstep WORDS` on the cluster, in a copy of `folder`, with this everstep; return the job's id.

        Raises:
            UserError: the folder cannot be shipped.
            ClusterGone: the server does not answer.
        """
        job = f"everstep-{words[0]}-{run}-{new_id()[:6]}"
        environment: dict[str, Any] = {
            "env_vars": ENVIRONMENT,
            "py_modules": [str(Path(everstep.__file__).parent)],
            "excludes": ["__pycache__"],
        }
        command = f"exec python -m everstep {shlex.join(words)}"  # no shell between Ray's signal and us
        with tempfile.TemporaryDirectory() as scratch:
            if folder is not None:
                archive = Path(scratch) / "folder.zip"
                pack(folder, archive, needed)
                environment["working_dir"] = str(archive)
            with self._spoken():
                self._client.submit_job(
                    entrypoint=command, submission_id=job, runtime_env=environment, metadata={"everstep_run": run}
                )
        return job

    def knows(self, job: str) -> bool:
        """Return whether the server still has this job; a new head has not."""
        try:
            with self._spoken():
                self._client.get_job_info(job)
        except RunFailed:
            return False
        return True

    def stop(self, job: str) -> None:
        """Send a job's command Ctrl-C."""
        with self._spoken():
            self._client.stop_job(job)

    def watch(self, job: str, start_timeout_s: float, seen: int = 0) -> Iterator[str | Outcome]:
        """Yield what a job writes as it comes, "" when nothing does for a moment, and at last how it ended.

        Args:
            job: its id.
            start_timeout_s: how long it may wait for its start.
            seen: how many characters of it are known already.

        Raises:
            ClusterGone: the server stopped answering.
            RunFailed: the job did not start in time, or nobody knows it.
        """
        began, tail, due = clock.monotonic(), None, 0.0
        while True:
            if clock.monotonic() >= due:
                due = clock.monotonic() + LOOK_S
                with self._spoken():
                    info = self._client.get_job_info(job)
                if info.status.is_terminal():
                    with self._spoken():
                        yield self._client.get_job_logs(job)[seen:]
                    yield _outcome(info)
                    return
                if info.status == JobStatus.PENDING:
                    self._not_too_long(job, clock.monotonic() - began, start_timeout_s, info.message or "")
                elif tail is None or not tail.thread.is_alive():
                    tail = _Tail(self._client, job, skip=seen)
            text = tail.read(QUIET_S) if tail is not None else ""
            if tail is None:
                clock.sleep(QUIET_S)
            seen += len(text)
            yield text

    def _not_too_long(self, job: str, waited_s: float, limit_s: float, said: str) -> None:
        if waited_s < limit_s:
            return
        self.stop(job)
        said = said.strip() or "nothing"
        raise RunFailed(
            f"the job {job} is still PENDING after {limit_s:g} s, and was stopped. Ray says: {said}",
            hint="on the head: `ray status` (is there a node for the job's driver?), then the newest "
            "runtime_env_setup-*.log and raylet.err in /tmp/ray/session_latest/logs; --start-timeout waits longer",
        )

    def _reach(self) -> None:
        """Connect and hang up: without this a request to a dead address would wait for minutes."""
        parts = urlsplit(self.address)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), REACH_S).close()

    @contextlib.contextmanager
    def _spoken(self) -> Iterator[None]:
        """Turn what goes wrong with a request into our errors."""
        try:
            yield
        except AuthenticationError as error:
            raise UserError(
                f"the Ray cluster at {self.address} does not take this user's token",
                hint=TOKEN,
            ) from error
        except (requests.exceptions.RequestException, OSError) as error:
            cause = error.__cause__ or error.__context__ or error
            raise ClusterGone(
                f"no Ray cluster answers at {self.address} ({getattr(cause, 'strerror', None) or cause})",
                hint="give the URL of its dashboard, as `ray up` or `ray start --head` printed it; a dashboard on "
                "another machine may need: ray dashboard cluster.yaml",
            ) from error
        except RuntimeError as error:
            if "status code 5" in str(error):  # the server is there, what is behind it is not
                raise ClusterGone(
                    f"the head at {self.address} cannot answer: {_short(error)}", hint="try again"
                ) from error
            raise RunFailed(f"Ray refused: {_short(error)}", hint=f"is {self.address} a Ray dashboard?") from error


class _Client(JobSubmissionClient):
    """Ray's client, whose every request ends: a head that is stopped must not stop us."""

    def _do_request(self, *arguments: Any, **options: Any) -> Any:
        return super()._do_request(*arguments, **{"timeout": (REACH_S, ANSWER_S)} | options)


class _Tail:
    """Reads what a job writes, in a thread, until the job ends or the connection breaks.

    Args:
        client: of Ray.
        job: its id.
        skip: how many characters are known already; Ray begins at the beginning.
    """

    def __init__(self, client: JobSubmissionClient, job: str, skip: int) -> None:
        self._client, self._job, self._skip = client, job, skip
        self._chunks: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="tail", daemon=True)
        self.thread.start()

    def read(self, wait_s: float) -> str:
        """Return what came, if something comes within `wait_s`."""
        try:
            return self._chunks.get(timeout=wait_s)
        except queue.Empty:
            return ""

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # best effort: whoever watches the job sees what became of it, and rereads
            asyncio.run(self._tail())

    async def _tail(self) -> None:
        async for text in self._client.tail_job_logs(self._job):
            new, self._skip = text[self._skip :], max(self._skip - len(text), 0)
            if new:
                self._chunks.put(new)


def url_of(address: str) -> str:
    """Return the dashboard's URL for what the user gave.

    Raises:
        UserError: it is something else.
    """
    url = (address if "://" in address else f"http://{address}").rstrip("/")
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise UserError(
            f"--address {address}: expected the URL of a Ray dashboard",
            hint="as in --address http://10.0.0.4:8265; `ray up` and `ray start --head` print it",
        )
    return url


def _outcome(info: Any) -> Outcome:
    """Return how a job ended, from what Ray keeps of it."""
    code, message = info.driver_exit_code, (info.message or "").strip()
    if info.status == JobStatus.SUCCEEDED:
        return Outcome(0)
    if info.status == JobStatus.STOPPED:
        return Outcome(INTERRUPTED)
    if code is None:
        return Outcome(1, f"the job could not be run: {message[-2000:]}")
    killed = -code if code < 0 else code - 128
    if code == 127:
        return Outcome(1, "the cluster has no `python` on its PATH")
    if code < 0 or code > INTERRUPTED:
        names = {number.value: number.name for number in signal.Signals}
        return Outcome(1, f"the job's driver was killed ({names.get(killed, code)})")
    return Outcome(code)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(part) if part.isdecimal() else 0 for part in version.split(".")[:2])


def _short(error: Exception) -> str:
    text = str(error).strip()
    last = text.splitlines()[-1] if text else type(error).__name__
    return text if len(text) < 500 else last[:500]


@contextlib.contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    """Take variables out of the environment for a while."""
    held: Mapping[str, str] = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)
