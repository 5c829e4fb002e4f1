"""Hooks into botocore: answers a server never gave, and answers that get lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from botocore.awsrequest import AWSResponse
from botocore.exceptions import ConnectionClosedError

from everstep.storage.s3 import S3Store
from tests.seaweed import BUCKET, Seaweed


def on(store: S3Store, event: str, act: Callable[..., Any]) -> None:
    store._client.meta.events.register(event, act)


def uploads(seaweed: Seaweed, store: S3Store) -> list[str]:
    prefix = store.url.removeprefix(f"s3://{BUCKET}/")
    found = seaweed.client().list_multipart_uploads(Bucket=BUCKET, Prefix=prefix + "/")
    return [upload["Key"] for upload in found.get("Uploads", ())]


def answer(status: int, code: str) -> Any:
    """Return what botocore takes for the answer of a server."""

    class Raw:
        def stream(self) -> list[bytes]:
            return [f"<Error><Code>{code}</Code><Message>of the test</Message></Error>".encode()]

    return AWSResponse("http://nowhere", status, {}, Raw())


def calls(store: S3Store, operation: str) -> list[int]:
    """Return a list that grows by one with every request of that operation."""
    seen: list[int] = []
    on(store, f"before-send.s3.{operation}", lambda request, **_: seen.append(1))
    return seen


def lose_first_answer(store: S3Store, operation: str) -> list[int]:
    """Let the server do the first request and lose its answer, whose status goes into the list returned."""
    lost: list[int] = []

    def send(request: Any, **_: object) -> None:
        if not lost:
            answered = store._client._endpoint.http_session.send(
                request.prepare() if hasattr(request, "prepare") else request
            )
            lost.append(answered.status_code)
            raise ConnectionClosedError(endpoint_url="http://nowhere", error=OSError("lost by the test"))

    on(store, f"before-send.s3.{operation}", send)
    return lost
