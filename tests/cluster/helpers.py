"""Running whole jobs: in this process on the session's Ray, or as the command in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from everstep.actors import session
from everstep.actors.environment import ray
from everstep.actors.run import Handle, launch
from everstep.actors.spec import recipe_of, store_of
from everstep.core import clock
from everstep.platform.settings import JobSettings, from_dict, to_dict
from everstep.storage.chain import Chain
from everstep.training.history import sizes
from everstep.training.recipe import Recipe
from everstep.training.verify import verify

ROOT = Path(__file__).resolve().parents[2]
MARK = "EVERSTEP_TEST_MARK"  # in the environment of every process that a test causes
STEPS = 60
RUN_S = 200.0
POINTS = ("before_exchange", "after_exchange", "before_commit", "after_commit", "after_send")
ENDED = ("done", "failed", "stopped")

Fault = Mapping[str, Any]

CHAR_LM: dict[str, Any] = {
    "task": {"name": "char_lm", "size": "tiny", "block": 32},
    "batch": {"global_size": 8, "micro_shards": 4},
    "optimizer": {"name": "adamw", "lr": 3e-3},
}
DIGITS: dict[str, Any] = {
    "task": {"name": "digits", "width": 16},
    "batch": {"global_size": 16, "micro_shards": 4},
    "optimizer": {"name": "adamw", "lr": 2e-3},
    "eval": {"every": 20},
}
TOPK: dict[str, Any] = {"compression": {"method": "topk", "density": 0.05}}
SURVIVOR: dict[str, Any] = {"compression": {"method": "topk", "density": 0.05, "residual": "survivor"}}
CONFIGS: dict[str, dict[str, Any]] = {
    "char_lm": CHAR_LM,
    "char_lm-topk": CHAR_LM | TOPK,
    "char_lm-survivor": CHAR_LM | SURVIVOR,
    "digits": DIGITS,
    "digits-topk": DIGITS | TOPK,
}


@dataclass(frozen=True)
class Done:
    """A run that has ended: its settings, its summary and what it told on the way."""

    settings: JobSettings
    summary: dict[str, Any]
    lines: list[str]

    @property
    def digest(self) -> str:
        return str(self.summary["digest"])

    @property
    def chain(self) -> Chain:
        return Chain.open(store_of(self.settings), self.settings.run.name or "")

    @property
    def recipe(self) -> Recipe:
        return recipe_of(self.settings)

    def faults(self) -> list[dict[str, Any]]:
        """The account: one row a healing."""
        return list(self.summary["faults"])

    def firings(self) -> list[dict[str, Any]]:
        """The stored firings of injected faults, one a struck process."""
        return [body for name, body in sorted(self.chain.events().items()) if name.startswith("fault-")]

    def verify(self) -> dict[str, Any]:
        """Prove the log as it is stored; nothing may be wrong with it."""
        found = verify(store_of(self.settings), self.settings.run.name or "", lambda _: self.recipe)
        assert not found["problems"], found["problems"]
        return found


def job(
    store: Path | str, name: str, config: str | Mapping[str, Any], faults: Sequence[Fault] = (), /, **changes: Any
) -> JobSettings:
    """Return settings of a small job; `changes` are keys by section, merged over the configuration.

    A spare costs a process of its own and another when it is used, so only jobs that lose several workers have one.
    """
    lost = sum(fault["kind"] in ("kill_worker", "kill_workers", "stop_worker") for fault in faults)
    data: dict[str, Any] = {
        "run": {"name": name, "store": f"file:{store}", "steps": STEPS, "seed": 1, "digest_every": 10},
        "workers": {"min": 2, "max": 2, "spares": int(lost > 1), "hang_timeout_s": 30.0},
        "checkpoint": {"segment_steps": 8, "base_interval": 25, "compressor_interval": 15, "max_lag_s": 1.0},
        "faults": [dict(fault) for fault in faults],
    }
    for part in (CONFIGS[config] if isinstance(config, str) else config, changes):
        for section, keys in part.items():
            data[section] = {**data.get(section, {}), **keys}
    return from_dict(data)


def run(settings: JobSettings, resume: str | None = None, at: int | None = None) -> Done:
    """Run a job to its end on the session's Ray; its actors are gone afterwards, whatever happens.

    Raises:
        EverstepError: what ended it.
    """
    with launched(settings, resume, at) as handle:
        state = wait(handle)
        assert state["state"] in ENDED, f"after {RUN_S} s: {state}"
        return Done(settings, handle.summary(), list(state["events"]))


@contextlib.contextmanager
def launched(settings: JobSettings, resume: str | None = None, at: int | None = None) -> Iterator[Handle]:
    handle = launch(settings, resume=resume, at=at)
    try:
        yield handle
    finally:
        handle.close()
        with contextlib.suppress(ray.exceptions.RayError):  # a run that has not ended is not closed by `close`
            ray.get(handle._handler.close.remote(), timeout=20)
            ray.kill(handle._handler, no_restart=True)


def wait(handle: Handle, until: int | None = None) -> dict[str, Any]:
    """Wait for the end of a run, or until it has taken step `until`; return its last state."""
    deadline = clock.monotonic() + RUN_S
    while clock.monotonic() < deadline:
        state = handle.progress()
        if state["state"] in ENDED or (until is not None and state["lsn"] >= until):
            break
        clock.sleep(0.05)
    return state


class References:
    """What undisturbed runs end with, each run once a session."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self._done: dict[str, Done] = {}

    def run(self, config: str) -> Done:
        if config not in self._done:
            self._done[config] = run(job(self.store, f"reference-{config}", config))
        return self._done[config]

    def digest(self, config: str) -> str:
        return self.run(config).digest


@dataclass(frozen=True)
class Answer:
    """What a command left: exit code, output, and the JSON object if one was asked for."""

    code: int
    out: str
    err: str
    json: dict[str, Any]


class Command:
    """The command in a process of its own, in a session of its own, on a Ray of its own."""

    def __init__(self, *words: str, cwd: Path) -> None:
        self.mark = uuid.uuid4().hex
        path = os.pathsep.join([str(cwd), str(ROOT)])
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_ADDRESS")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "everstep", *words],
            cwd=cwd, env={**env, MARK: f"{os.environ.get(MARK, '')}+{self.mark}", "PYTHONPATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        for process in marked(self.mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.communicate()

    def answer(self, timeout_s: float = 150) -> Answer:
        """Wait for the command's end."""
        out, err = self.process.communicate(timeout=timeout_s)
        lines = out.splitlines()
        found = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
        return Answer(self.process.returncode, out, err, found)

    def left(self, patience_s: float = 20) -> list[str]:
        """Return what is left of its processes when there has been time to go."""
        return left(self.mark, patience_s)


def command(*words: str, cwd: Path, timeout_s: float = 150) -> Answer:
    """Run the command to its end; nothing of it is left, whatever happens."""
    with Command(*words, cwd=cwd) as started:
        return started.answer(timeout_s)


def marked(mark: str) -> list[psutil.Process]:
    """Return every living process, but this one, with `mark` in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and mark in process.environ().get(MARK, ""):
                found.append(process)
        except psutil.Error:
            continue  # gone, a zombie, or somebody else's
    return found


def left(mark: str, patience_s: float) -> list[str]:
    deadline = clock.monotonic() + patience_s
    while (found := marked(mark)) and clock.monotonic() < deadline:
        clock.sleep(0.2)
    names = []
    for process in found:
        with contextlib.suppress(psutil.Error):
            names.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
    return names


def world_sizes(settings: JobSettings) -> list[int]:
    """Return the world sizes of a run so far, as its log has them."""
    store, name = store_of(settings), settings.run.name or ""
    return [size for _, size in sizes(Chain.open(store, name).events())] if Chain.exists(store, name) else []


def write_job(path: Path, settings: JobSettings) -> str:
    """Write settings as a job file; return its name."""
    lines: list[str] = []
    for section, keys in to_dict(settings).items():
        if isinstance(keys, dict):
            lines += [f"[{section}]", *(f"{k} = {json.dumps(v)}" for k, v in keys.items() if v is not None)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def connect() -> None:
    """Start the Ray that all tests in this process share."""
    session.connect(job("/nowhere", "none", "char_lm"))
