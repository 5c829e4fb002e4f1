"""Connecting to Ray: the cluster in `RAY_ADDRESS`, or one of our own on this machine, bound to loopback."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from everstep.actors import environment
from everstep.actors.environment import NAMESPACE, ray
from everstep.platform.settings import JobSettings

LOCAL_CPUS = 8  # logical; actors are processes, the machine shares them out
STORE_BYTES = 1 << 30  # of the local object store: records in flight and one state


def connect(settings: JobSettings) -> bool:
    """Connect this process; return whether the cluster is our own and ends with us."""
    environment.prepare()
    runtime = {
        "env_vars": {"PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    }
    options: dict[str, Any] = {
        "namespace": NAMESPACE, "logging_level": "ERROR", "log_to_driver": False, "runtime_env": runtime,
    }  # fmt: skip
    if ray.is_initialized():
        return False
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address="auto", **options)
        return False
    _quieten()
    workers, check = settings.workers, settings.checkpoint
    wanted = (workers.max + workers.spares) * workers.cpus + check.actors + 2
    ray.init(
        num_cpus=max(LOCAL_CPUS, int(wanted)), include_dashboard=False, _node_ip_address="127.0.0.1",
        object_store_memory=STORE_BYTES, **options,
    )  # fmt: skip
    return True


def disconnect(own: bool) -> None:
    """Leave the cluster, ending it if it is our own."""
    if own:
        ray.shutdown()


class _Without:
    """A stream that leaves out Ray's page-long lines about processes that died: we say it in one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._left_out = False

    def write(self, text: str) -> int:
        left_out = "(raylet)" in text and ("A worker died or was killed" in text or "actor died" in text)
        newline = self._left_out and text == "\n"  # the end of a line that was left out comes by itself
        self._left_out = left_out
        return len(text) if left_out or newline else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _quieten() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Without):
            setattr(sys, name, _Without(stream))
