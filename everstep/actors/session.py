"""Connecting to Ray: the cluster in `RAY_ADDRESS`, or one of our own on this machine, bound to loopback."""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any, TextIO

from everstep.actors import environment
from everstep.actors.environment import NAMESPACE, ray
from everstep.core.errors import ClusterGone, UserError
from everstep.platform.settings import JobSettings

LOCAL_CPUS = 8  # logical; actors are processes, the machine shares them out
STORE_BYTES = 1 << 30  # of the local object store: records in flight and one state
ADDRESS = "RAY_ADDRESS"
JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # what Ray tells the driver of a Ray job about its runtime environment
REACH_S = 5.0
LOOK = "look there with `ray status`; start a cluster with `ray up cluster.yaml` or `ray start --head`"

TOKEN = "put the cluster's token (`ray get-auth-token` there) into ~/.ray/auth_token, or in RAY_AUTH_TOKEN"


def connect(settings: JobSettings) -> bool:
    """Connect this process; return whether the cluster is our own and ends with us."""
    environment.prepare()
    if ray.is_initialized():
        return False
    if os.environ.get(ADDRESS):
        join()
        return False
    _quieten()
    workers, check = settings.workers, settings.checkpoint
    wanted = (workers.max + workers.spares) * workers.cpus + check.actors + 2
    ray.init(
        num_cpus=max(LOCAL_CPUS, int(wanted)), include_dashboard=False, _node_ip_address="127.0.0.1",
        object_store_memory=STORE_BYTES, **_options({}),
    )  # fmt: skip
    return True


def join() -> None:
    """Join the cluster in `RAY_ADDRESS`, or one that runs on this machine.

    Raises:
        ClusterGone: there is none, or it does not answer.
        UserError: it cannot be joined from here: another Ray, another Python, another token, no such address.
    """
    if ray.is_initialized():
        return
    address = os.environ.setdefault(ADDRESS, "auto")
    if address != "auto":
        reach(address)
    _quieten()
    try:
        ray.init(address="auto", **_options({ADDRESS: "auto"}))
    except ConnectionError as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        raise ClusterGone(f"no Ray cluster answers {where}", hint=LOOK) from error
    except ray.exceptions.AuthenticationError as error:
        raise UserError(
            f"the Ray cluster at {address} does not take this user's token",
            hint=TOKEN,
        ) from error
    except RuntimeError as error:
        raise explained(error, address) from error


def reach(address: str) -> None:
    """Return if something listens at `host:port`; Ray itself would try for minutes.

    Raises:
        UserError: this is no such address.
        ClusterGone: nothing listens there.
    """
    host, colon, port = address.rpartition(":")
    if "/" in address or not (colon and port.isdecimal()):
        raise UserError(
            f"{ADDRESS} is {address!r}, expected host:port of a cluster's head",
            hint="as in RAY_ADDRESS=10.0.0.4:6379; a dashboard's URL goes with: everstep submit JOB.toml --address URL",
        )
    host, seen = host.strip("[]"), address
    if host in ("localhost", "127.0.0.1", "::1"):  # Ray takes these for the machine's own address, unless told not to
        host = str(ray.util.get_node_ip_address())
        seen = f"{address}, which Ray takes for {host}:{port}"
    try:
        socket.create_connection((host, int(port)), REACH_S).close()
    except OSError as error:
        only_here = "; a cluster bound to 127.0.0.1 needs RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 here too"
        hint = LOOK + (only_here if seen != address and not host.startswith("127.") else "")
        raise ClusterGone(f"no Ray cluster answers at {seen} ({error.strerror or error})", hint=hint) from error


def explained(error: RuntimeError, address: str) -> Exception:
    """Return what Ray's refusal to join means for the user; an error that we do not know is left as it is."""
    text = str(error)
    if "ersion mismatch" not in text:
        return error
    found = [
        line.split(":", 1)[1].strip() for line in text.splitlines() if line.strip().startswith(("Ray:", "Python:"))
    ]
    if len(found) != 4:
        return UserError(text, hint="use the same Ray and Python here as on the cluster")
    return UserError(
        f"the cluster at {address} runs Ray {found[0]} on Python {found[1]}, this process Ray {found[2]} on {found[3]}",
        hint=f"use the same here, as in: pip install 'ray[default]=={found[0]}'; "
        "or let the cluster's own do it: everstep submit JOB.toml --address URL",
    )


def _options(variables: dict[str, str]) -> dict[str, Any]:
    """Return how any cluster is joined; `variables` are set for our actors.

    Actors find the user's modules where this process does, unless it is the driver of a Ray job that ships them. What
    the job has set itself is left alone: Ray refuses to merge two values.
    """
    job = json.loads(os.environ.get(JOB) or "{}").get("runtime_env") or {}
    if not job.get("working_dir"):
        path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        variables = variables | {"PYTHONPATH": path}
    wanted = {name: value for name, value in variables.items() if name not in (job.get("env_vars") or {})}
    return {
        "namespace": NAMESPACE, "logging_level": "ERROR", "log_to_driver": False, "runtime_env": {"env_vars": wanted},
    }  # fmt: skip


def disconnect(own: bool) -> None:
    """Leave the cluster, ending it if it is our own."""
    if own:
        ray.shutdown()


DEATHS = ("A worker died or was killed", "actor died", "Raylet is terminated")


class _Without:
    """A stream that leaves out Ray's page-long lines about processes and nodes that died: we say it in one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._left_out = False

    def write(self, text: str) -> int:
        left_out = "(raylet)" in text and any(death in text for death in DEATHS)
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
