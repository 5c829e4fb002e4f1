"""The other side of `recovery.py`: the same model, data and batch in Ray Train, whose workers write down their steps.

Each worker process writes one file, `RANK-PID`: a line for every finished optimizer step, by the wall clock.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from recovery_ours import BATCH, CLIP_NORM, LEARNING_RATE, until

from everstep.actors.environment import ray  # noqa: F401  # before ray.train: sets what Ray reads when it is imported
from everstep.core import clock
from everstep.core.ids import new_id
from everstep.tasks.char_lm import CharLM
from everstep.training.data import sample_ids

import ray.train  # isort: skip  # noqa: F811
import ray.train.torch  # isort: skip
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig  # isort: skip

NAME = "Ray Train V2"
SEED = 1


@dataclass(frozen=True)
class Plan:
    """One run: a checkpoint every so many steps, the kill after step `kill`, the end after step `last`."""

    folder: str
    size: str
    every: int
    kill: int
    last: int


@dataclass(frozen=True)
class Attempt:
    """What one worker process did: (wall clock, step) of every step it finished."""

    rank: int
    pid: int
    steps: list[tuple[float, int]]


def loop(config: dict[str, Any]) -> None:
    """Train as everstep's quickstart does, with DistributedDataParallel."""
    plan, context = Plan(**config), ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    task = CharLM(size=plan.size)
    torch.manual_seed(SEED)
    model = ray.train.torch.prepare_model(task.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    dataset = task.dataset("train")
    start = restored(model, optimizer)
    with open(Path(plan.folder) / f"{rank}-{os.getpid()}", "a", buffering=1) as done:
        for step in range(start, plan.last + 1):
            ids = sample_ids(SEED, len(dataset), (step - 1) * BATCH, BATCH)[rank::size]  # type: ignore[arg-type]
            optimizer.zero_grad(set_to_none=True)
            task.loss(model, torch.stack([dataset[i] for i in ids])).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            done.write(f"{clock.wall()} {step}\n")
            if step % plan.every == 0:
                report(rank, step, model, optimizer)


def restored(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the last checkpoint, if there is one; return the step to go on with."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 1
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder) / "state.pt")
    model.module.load_state_dict(state["model"])  # type: ignore[union-attr]
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"]) + 1


def report(rank: int, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if rank != 0:
            ray.train.report({"step": step})
            return
        state = {"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}  # type: ignore[union-attr]
        torch.save(state, Path(folder) / "state.pt")
        ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))


def attempts(folder: Path) -> dict[str, Attempt]:
    """Return what every worker process that ever was has written, whole lines only."""
    out = {}
    for path in folder.glob("*-*"):
        rank, pid = map(int, path.name.split("-"))
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        out[path.name] = Attempt(rank, pid, [(float(wall), int(step)) for wall, step in lines])
    return out


class Fit(threading.Thread):
    """`TorchTrainer.fit` beside the one who kills."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self.trainer = ray.train.torch.TorchTrainer(
            loop,
            train_loop_config=asdict(plan),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name=f"bench-{new_id()}",
                storage_path=f"{plan.folder}/store",
                failure_config=FailureConfig(max_failures=-1),
            ),
        )

    def run(self) -> None:
        try:
            self.trainer.fit()
        except BaseException as error:
            self.error = error

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def measure(folder: str, size: str, every: int, repeat: int, repeats: int) -> dict[str, Any]:
    """SIGKILL one worker between two checkpoints, each repeat at another place between them; ranks 0 and 1 in turn."""
    kill = 2 * every + int((repeat + 0.5) / repeats * every)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        plan = Plan(own, size, every, kill, 3 * every + 5)
        fit = Fit(plan)
        fit.start()
        victim = until(f"step {kill} of Ray Train", lambda: _reached(fit, Path(own), repeat % 2, kill))
        killed = clock.wall()
        os.kill(victim.pid, signal.SIGKILL)
        old = set(attempts(Path(own)))
        until("Ray Train's end", lambda: not fit.is_alive())
        fit.check()
        return _account(attempts(Path(own)), old, killed, every)


def _reached(fit: Fit, folder: Path, rank: int, step: int) -> Attempt | None:
    fit.check()
    found = (one for one in attempts(folder).values() if one.rank == rank and one.steps and one.steps[-1][1] >= step)
    return next(found, None)


def _account(found: dict[str, Attempt], old: set[str], killed: float, every: int) -> dict[str, Any]:
    """Return seconds from the kill, and the finished steps that were taken again; a step is done when all have it."""
    before = [one for name, one in found.items() if name in old]
    after = [one for name, one in found.items() if name not in old and one.steps]
    reached = max(step for one in before for _, step in one.steps)
    resumed = after[0].steps[0][1]
    pairs = zip(before[0].steps, before[0].steps[1:], strict=False)
    seconds = [later - wall for (wall, _), (later, step) in pairs if step % every != 1]  # that one waits for a report
    first = max(one.steps[0][0] for one in after)
    new = max(wall for one in after for wall, step in one.steps if step == reached + 1)
    return {
        "case": NAME,
        "next_step_s": round(first - killed, 3),
        "new_step_s": round(new - killed, 3),
        "two_again_s": round(first - killed, 3),
        "steps_again": reached + 1 - resumed,
        "reached": reached,
        "resumed_at": resumed,
        "restarts": len(after) // 2,
        "step_ms": round(1e3 * statistics.median(seconds), 1),
    }
