"""A Ray head of a test's own, as an operator starts it: `ray start --head --block`, on loopback, ended by pid."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import psutil

from everstep.core import clock
from tests.cluster.helpers import MARK, ROOT, left, marked

BIN = Path(sys.executable).parent
START_S = 60.0
CLIENTS = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_JOB_CONFIG_JSON_ENV_VAR")
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # every process binds to 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "RAY_health_check_initial_delay_ms": "1000",  # as in cluster.yaml, a little more patient
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
    "PYTHONPATH": str(ROOT),
    "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",  # Ray jobs call `python`
}


def free_ports(count: int) -> list[int]:
    """Return ports that are free now, below those that Ray gives to its workers."""
    found: list[int] = []
    start = 4000 + os.getpid() * 37 % 5000
    for port in range(start, start + 900):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no free ports")


class Head:
    """A head with its dashboard; after `kill`, `start` brings up a new one at the same address."""

    def __init__(self, cpus: int = 8, ip: str = "127.0.0.1") -> None:
        self.cpus, self.ip = cpus, ip
        self.folder = Path(tempfile.mkdtemp(prefix="esh"))  # short: a path of a socket has 107 bytes
        self.gcs, self.dashboard, *self._ports = free_ports(7)
        self.address, self.url = f"{ip}:{self.gcs}", f"http://{ip}:{self.dashboard}"
        self.mark = uuid.uuid4().hex
        self.env = {name: value for name, value in os.environ.items() if name not in CLIENTS} | ENVIRONMENT
        self.env[MARK] = f"{os.environ.get(MARK, '')}+{self.mark}"
        if ip != "127.0.0.1":  # other nodes may join; Ray takes only the first loopback address for the outside one
            self.env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Head:
        try:
            self.start()
        except BaseException:  # also Ctrl-C: nothing of it may be left
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        assert not left(self.mark, 10)

    def start(self) -> None:
        """Start it and wait until its job server answers."""
        names = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port",
                 "metrics-export-port", "ray-client-server-port")  # fmt: skip
        ports = [f"--{name}={port}" for name, port in zip(names, self._ports, strict=True)]
        with (self.folder / "head.log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(BIN / "ray"), "start", "--head", "--block", f"--node-ip-address={self.ip}", f"--port={self.gcs}",
                 f"--dashboard-host={self.ip}", f"--dashboard-port={self.dashboard}", f"--num-cpus={self.cpus}",
                 "--object-store-memory=200000000", f"--temp-dir={self.folder / 'ray'}", "--min-worker-port=0",
                 "--max-worker-port=0", "--disable-usage-stats", *ports],
                env=self.env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        deadline = clock.monotonic() + START_S
        while not self._answers():
            said = (self.folder / "head.log").read_text()[-2000:]
            assert self.process.poll() is None and clock.monotonic() < deadline, said
            clock.sleep(0.2)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/api/version", timeout=5).close()
        except urllib.error.HTTPError:
            return True  # it wants a token
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL every process of it, as when its machine dies."""
        while found := marked(self.mark):
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found, timeout=10)
        if self.process is not None:
            self.process.wait()

    def close(self) -> None:
        """End it by pid, gently first: it writes down what it has to."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Node:
    """A further raylet in a head's cluster, at a loopback address of its own.

    Args:
        head: started, with an `ip` from 127.0.0.2 on.
        address: another such.
        cpus: what it offers.
    """

    def __init__(self, head: Head, address: str, cpus: int) -> None:
        self.head, self.address, self.cpus = head, address, cpus
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; it joins the cluster by itself."""
        env = self.head.env | {MARK: f"{self.head.env[MARK]}+{self.mark}"}
        with (self.head.folder / f"{self.address}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(BIN / "ray"), "start", "--block", f"--address={self.head.address}",
                 f"--node-ip-address={self.address}", f"--num-cpus={self.cpus}", "--object-store-memory=200000000",
                 "--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats"],
                env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def keep(self) -> None:
        """Start it again if it has given up: on a busy machine `ray start` waits thirty seconds in vain."""
        if self.process is not None and self.process.poll() is not None:
            self.kill()
            self.start()

    def kill(self) -> None:
        """SIGKILL its raylet and every process on it."""
        if self.process is not None:
            while found := marked(self.mark):
                for process in found:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                psutil.wait_procs(found, timeout=10)
            self.process.wait()
