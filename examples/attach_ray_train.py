"""In a Ray Train TorchTrainer: a worker is killed once, and the run goes on from the last finished step."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from ray import train
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import everstep

STEPS, KILLED_AT = 60, 40


def train_loop(config: dict[str, Any]) -> None:
    rank = train.get_context().get_world_rank()
    torch.manual_seed(rank)
    model = prepare_model(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    log = everstep.attach(model, optimizer, run="attach-ray-train", store=config["store"])
    state = log.restore()
    for step in range(first := state.cursor if state else 0, STEPS):
        x = torch.randn(32, 16)
        loss = F.mse_loss(model(x), x.sin().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        if rank == 1 and step + 1 == KILLED_AT and state is None:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        log.step(loss, cursor=step + 1, rng=True)
    log.close()
    if rank == 0:
        said = f"killed in step {KILLED_AT}, went on after step {first}, loss {loss.item():.4f} after step {STEPS}"
        Path(config["notes"]).write_text(said)


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"store": f"file:{folder}/everstep-runs", "notes": f"{folder}/notes"},
            scaling_config=train.ScalingConfig(num_workers=2),
            run_config=train.RunConfig(storage_path=folder, failure_config=train.FailureConfig(max_failures=1)),
        )
        trainer.fit()
        print(Path(folder, "notes").read_text())


if __name__ == "__main__":
    main()
