"""Machines for `ray up` that cost nothing: each one is an address 127.0.0.x of this computer and a folder, its home.

With `provider: {type: external, module: examples.loopback.provider.LoopbackProvider}` a cluster file of any shape runs
for real, autoscaler included, without a cloud, ssh or docker: `cluster.local.yaml`. The folder that holds `examples`
has to be on PYTHONPATH of `ray up` (the cluster's own processes get it from here).

Keys of `provider:`
    folder: where the machines are; short, as sockets lie below it. Default /tmp/everstep-loopback.
    first: the last part of the first address. Default 10: 127.0.0.10, 127.0.0.11, ...
    env: variables for every command on a machine, besides those of `ray up`.

Every command sees NODE_IP (its machine's address), MACHINE (its name) and HOME (its folder). A machine is terminated by
SIGKILL of every process that has its MACHINE in the environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil
from ray.autoscaler.command_runner import CommandRunnerInterface
from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import TAG_RAY_CLUSTER_NAME

T = TypeVar("T")
State = dict[str, Any]  # {"made": how many machines ever were, "machines": {name: {"ip", "tags"}}}
ROOT = Path(__file__).resolve().parents[2]


class LoopbackRunner(CommandRunnerInterface):  # type: ignore[misc]
    """Runs commands "on" a machine, with bash."""

    def __init__(self, home: Path, variables: Mapping[str, str]) -> None:
        self.home, self.variables = home, variables

    def run(
        self, cmd: str | None = None, timeout: int = 120, exit_on_fail: bool = False, port_forward: Any = None,
        with_output: bool = False, environment_variables: Mapping[str, object] | None = None, run_env: str = "auto",
        ssh_options_override_ssh_key: str = "", shutdown_after_run: bool = False, **_: Any,
    ) -> str:  # fmt: skip
        more = {k: v if isinstance(v, str) else json.dumps(v) for k, v in (environment_variables or {}).items()}
        done = subprocess.run(
            ["bash", "-c", cmd or "true"], env={**os.environ, **self.variables, **more}, cwd=self.home, timeout=timeout,
            stdout=subprocess.PIPE if with_output else None, check=True, text=True, start_new_session=True,
        )  # fmt: skip
        return done.stdout or ""

    def run_rsync_up(self, source: str, target: str, options: Any = None) -> None:
        copy(Path(source).expanduser(), self._path(target))

    def run_rsync_down(self, source: str, target: str, options: Any = None) -> None:
        copy(self._path(source), Path(target).expanduser())

    def remote_shell_command_str(self) -> str:
        return f"env HOME={self.home} bash"

    def run_init(self, *, as_head: bool, file_mounts: Any, sync_run_yet: bool) -> bool | None:
        return None

    def _path(self, text: str) -> Path:
        return self.home / text.removeprefix("~/") if text.startswith("~/") else Path(text)


class LoopbackProvider(NodeProvider):  # type: ignore[misc]
    """Machines in one file, as `ray up` and the autoscaler are different processes."""

    def __init__(self, provider_config: dict[str, Any], cluster_name: str) -> None:
        super().__init__(provider_config, cluster_name)
        self.folder = Path(provider_config.get("folder", "/tmp/everstep-loopback"))
        self.folder.mkdir(parents=True, exist_ok=True)

    # ---- what there is ----

    def non_terminated_nodes(self, tag_filters: Mapping[str, str]) -> list[str]:
        found = self._state(lambda state: dict(state["machines"]))
        return [name for name, machine in found.items() if tag_filters.items() <= machine["tags"].items()]

    def is_running(self, node_id: str) -> bool:
        return self._machine(node_id) is not None

    def is_terminated(self, node_id: str) -> bool:
        return self._machine(node_id) is None

    def node_tags(self, node_id: str) -> dict[str, str]:
        return dict((self._machine(node_id) or {"tags": {}})["tags"])

    def internal_ip(self, node_id: str) -> str | None:
        machine = self._machine(node_id)
        return None if machine is None else str(machine["ip"])

    def external_ip(self, node_id: str) -> str | None:
        return self.internal_ip(node_id)

    # ---- what changes it ----

    def create_node(self, node_config: Mapping[str, Any], tags: Mapping[str, str], count: int) -> dict[str, Any]:
        def make(state: State) -> dict[str, Any]:
            first, made = self.provider_config.get("first", 10), {}
            for _ in range(count):
                name = f"m{state['made']}"
                made[name] = {
                    "ip": f"127.0.0.{first + state['made']}",
                    "tags": {**tags, TAG_RAY_CLUSTER_NAME: self.cluster_name},
                }
                state["made"] += 1
            state["machines"].update(made)
            return made

        made = self._state(make)
        for name in made:
            (self.folder / name).mkdir(exist_ok=True)
        return made

    def set_node_tags(self, node_id: str, tags: Mapping[str, str]) -> None:
        def change(state: State) -> None:
            if node_id in state["machines"]:
                state["machines"][node_id]["tags"].update(tags)

        self._state(change)

    def terminate_node(self, node_id: str) -> dict[str, Any]:
        home = str(self.folder / node_id)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("MACHINE") == home:
                    process.kill()
        self._state(lambda state: state["machines"].pop(node_id, None))
        shutil.rmtree(home, ignore_errors=True)
        return {}

    def terminate_nodes(self, node_ids: list[str]) -> dict[str, Any]:
        for node_id in node_ids:
            self.terminate_node(node_id)
        return {}

    # ---- how Ray gets onto them ----

    def get_command_runner(
        self, log_prefix: str, node_id: str, auth_config: Any, cluster_name: str, process_runner: Any,
        use_internal_ip: bool, docker_config: Any = None,
    ) -> LoopbackRunner:  # fmt: skip
        home = self.folder / node_id
        paths = [Path(sys.executable).parent, ROOT]
        variables = {
            "HOME": str(home), "MACHINE": str(home), "NODE_IP": self.internal_ip(node_id) or "",
            "PATH": f"{paths[0]}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": f"{paths[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
        }  # fmt: skip
        return LoopbackRunner(home, variables | self.provider_config.get("env", {}))

    def prepare_for_head_node(self, cluster_config: dict[str, Any]) -> dict[str, Any]:
        return cluster_config

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        return cluster_config

    def _machine(self, name: str) -> dict[str, Any] | None:
        return self._state(lambda state: state["machines"].get(name))

    def _state(self, act: Callable[[State], T]) -> T:
        """Read the file, let `act` change it, write it back; one process at a time."""
        path = self.folder / "machines.json"
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state: State = json.loads(path.read_text()) if path.exists() else {"made": 0, "machines": {}}
            before = json.dumps(state)
            answer = act(state)
            if (after := json.dumps(state)) != before:
                (self.folder / "machines.new").write_text(after)
                os.replace(self.folder / "machines.new", path)
            return answer


def copy(source: Path, target: Path) -> None:
    """Copy a file, or a folder into a folder; nothing if both are the same."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.resolve() == target.resolve():
        return
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)
