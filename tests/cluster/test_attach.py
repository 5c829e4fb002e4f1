"""Library mode on a real Ray: loops die, checkpoint actors and keepers die, and every run ends with the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from everstep import cli
from everstep.actors.environment import NAMESPACE, ray
from everstep.actors.spec import actor_name
from everstep.core.errors import RunExists, SettingsError
from everstep.storage.chain import Chain
from everstep.storage.folder import FolderStore
from tests.cluster import helpers, own_loop
from tests.cluster.helpers import MARK, ROOT

PROGRAM = ROOT / "tests" / "cluster" / "own_loop.py"
DIES_AT = 40


@contextlib.contextmanager
def program(*words: str, cwd: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program in a process of its own; nothing of it is left, whatever happens."""
    mark = uuid.uuid4().hex
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_ADDRESS")} | {
        MARK: f"{os.environ.get(MARK, '')}+{mark}",
        "PYTHONPATH": str(ROOT),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    process = subprocess.Popen(
        [sys.executable, *words], cwd=cwd, env=env | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        for found in helpers.marked(mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.kill()
        process.kill()
        process.communicate()


def ran(*words: str, cwd: Path, **variables: str) -> tuple[int, str, str]:
    with program(*words, cwd=cwd, **variables) as process:
        out, err = process.communicate(timeout=150)
        return process.returncode, out, err


def chain_of(store: str, run: str) -> Chain:
    return Chain.open(FolderStore(store.removeprefix("file:")), run)


def digest(store: str, run: str) -> str:
    """Of a closed run that verifies."""
    found = cli.ask("chain", "verify", run, "--store", store)
    assert found["state"] == "closed" and found["equal"] and found["step"] == own_loop.STEPS and not found["gaps"]
    return str(found["digest"])


def gone(*roles: str, run: str) -> bool:
    """Whether a run's actors of these roles end."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        known = {item["name"] for item in ray.util.list_named_actors(all_namespaces=True)}
        if not any(name.startswith(actor_name(run, role)) for role in roles for name in known):
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def undisturbed(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    store = f"file:{tmp_path_factory.mktemp('undisturbed')}"
    assert own_loop.train(store, "whole") == {"first": 1, "exactness": None}
    assert gone("keeper", "checkpointer/", run="whole")
    return digest(store, "whole")


def test_a_plain_loop_that_is_killed_goes_on_with_the_same_bits(undisturbed: str, tmp_path: Path) -> None:
    store = f"file:{tmp_path}/runs"
    with program(str(PROGRAM), store, "killed", "0.03", str(DIES_AT), cwd=tmp_path) as process:
        assert process.wait(150) == -9
    state = next(row for row in cli.ask("runs", "ls", store)["runs"] if row["run"] == "killed")
    assert state["state"] == "open" and 0 < state["last_restorable"] < DIES_AT  # its cluster died with it

    found = own_loop.train(store, "killed")
    assert found == {"first": state["last_restorable"] + 1, "exactness": "bitwise"}
    assert digest(store, "killed") == undisturbed
    other = cli.ask("chain", "export", "killed", "--store", store, "--step", "17", "--out", str(tmp_path))
    assert other["step"] == 17


def test_lost_actors_cost_no_step(undisturbed: str, tmp_path: Path) -> None:
    store, struck = f"file:{tmp_path}", []

    def at(step: int, log: Any) -> None:
        if step == 20:
            struck.append(chain_of(store, "struck").manifest.generation)
            name = actor_name("struck", "checkpointer/", f"0-g{struck[0]}")
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        if step == 30:
            deadline = time.monotonic() + 60  # until another has taken its place
            while not chain_of(store, "struck").events("healing-") and time.monotonic() < deadline:
                time.sleep(0.1)
            ray.kill(ray.get_actor(actor_name("struck", "keeper"), namespace=NAMESPACE), no_restart=False)

    assert own_loop.train(store, "struck", pace_s=0.03, at=at)["first"] == 1
    assert digest(store, "struck") == undisturbed
    found = cli.ask("chain", "ls", "struck", "--store", store)
    assert found["generation"] > struck[0] and [row["kind"] for row in found["faults"]] == ["checkpointer_lost"]
    assert found["faults"][0]["steps_lost"] == 0
    assert gone("keeper", "checkpointer/", run="struck")


def test_a_run_belongs_to_one_program_and_one_model(cluster: None, tmp_path: Path) -> None:
    import torch
    from torch import nn

    import everstep

    store, model = f"file:{tmp_path}", nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = everstep.attach(model, optimizer, "mine", store)
    try:
        with pytest.raises(RunExists, match=f"is being written by .*process {os.getpid()} on"):
            everstep.attach(model, optimizer, "mine", store)
        model(torch.ones(1, 2)).sum().backward()
        log.step()
        raise KeyError("the loop breaks")
    except KeyError as error:
        log.__exit__(KeyError, error, None)
    other = nn.Linear(2, 3)
    with pytest.raises(SettingsError, match=r"weight: float32 \(2, 2\) in group 0, now float32 \(3, 2\)"):
        everstep.attach(other, torch.optim.SGD(other.parameters(), lr=0.1), "mine", store)
    with everstep.attach(model, optimizer, "mine", store) as log:  # from the replica that outlived the first
        state = log.restore()
        assert state is not None and state.step == 1 and state.exactness == "warm"
    assert gone("keeper", "checkpointer/", run="mine")
    with everstep.attach(model, optimizer, "mine", store) as log:  # it was closed; longer, then
        assert log.restore() == state
        model(torch.ones(1, 2)).sum().backward()
        log.step()
    assert cli.ask("chain", "verify", "mine", "--store", store)["step"] == 2


def test_ranks_of_torchrun_go_on_from_the_last_step(cluster: None, tmp_path: Path) -> None:
    """On a cluster that outlives them, so that the replica has every step they finished."""
    store = f"file:{tmp_path}/runs"
    address = ray.get_runtime_context().gcs_address
    words = ("-m", "torch.distributed.run", "--nproc-per-node", "2", str(PROGRAM), store, "ranks", "0.03")
    code, _, err = ran(*words, str(DIES_AT), cwd=tmp_path, RAY_ADDRESS=address)
    assert code == 1, err
    code, out, err = ran(*words, cwd=tmp_path, RAY_ADDRESS=address)
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert DIES_AT - 1 <= found["first"] <= DIES_AT and found["exactness"] == "warm"  # buffers are rank 0's
    assert digest(store, "ranks")
    assert gone("keeper", "checkpointer/", run="ranks")


def test_ray_train_goes_on_from_the_last_step(tmp_path: Path) -> None:
    code, out, err = ran(str(ROOT / "examples" / "attach_ray_train.py"), cwd=tmp_path)
    assert code == 0, err
    assert "killed in step 40, went on after step 39" in out or "went on after step 38" in out


@pytest.mark.parametrize(
    "words",
    [
        (str(ROOT / "examples" / "attach_plain.py"), "50"),
        ("-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "examples" / "attach_ddp.py"), "50"),
    ],
    ids=["plain", "ddp"],
)
def test_the_examples_run(tmp_path: Path, words: tuple[str, ...]) -> None:
    began = time.monotonic()
    code, out, err = ran(*words, cwd=tmp_path)
    assert code == 0, err
    assert "step 50" in out and "50 steps are durable" in err, time.monotonic() - began
