"""How `storage.s3` speaks to a service: client, patience with what passes, bodies, errors that say what to do."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import boto3.session
import urllib3.exceptions
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # its own, not the builtin
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
    SSLError,
)

from everstep.core import clock
from everstep.core.errors import ObjectMissing, StoreError, StoreFull, StoreRefused
from everstep.core.ids import new_id
from everstep.core.rng import fold
from everstep.storage.store import NEEDED

PATIENCE_S = 20.0  # no new attempt of a request after that
CONNECT_S, READ_S = 3.0, 10.0  # between two signs of life
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.0
PIECE = 1 << 20  # bytes sent in one go; larger bodies are streamed, so that a time-out counts from the last piece

BUSY = {429, 500, 502, 503, 504}
BUSY_CODES = {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "ConditionalRequestConflict"}
FULL_CODES = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "507"}
PAIR = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
HINTS = {
    "NoSuchBucket": "create the bucket {bucket} or correct run.store; AWS_ENDPOINT_URL says which service is asked",
    "AccessDenied": "allow the key in AWS_ACCESS_KEY_ID to list, get, put and delete objects in the bucket {bucket}",
    "InvalidAccessKeyId": f"set {PAIR} to a pair this service knows; AWS_ENDPOINT_URL says which service is asked",
    "SignatureDoesNotMatch": "set AWS_SECRET_ACCESS_KEY to the secret that belongs to AWS_ACCESS_KEY_ID",
    "ExpiredToken": f"get a new session, and set {PAIR} and AWS_SESSION_TOKEN to it",
    "InvalidToken": f"set AWS_SESSION_TOKEN to the one that came with {PAIR}, or unset it",
    "RequestTimeTooSkewed": "set this machine's clock",
    "PermanentRedirect": "set AWS_REGION to the region of the bucket {bucket}",
    "NotImplemented": NEEDED["s3"],
    "NoSuchUpload": "let nothing abort uploads (a lifecycle rule, another run's garbage collection) younger than a day",
    "PreconditionFailed": "let nothing but everstep write there; an object that must never change was replaced",
}
HINTS |= {
    "401": HINTS["InvalidAccessKeyId"],
    "403": HINTS["AccessDenied"],
    "AuthorizationHeaderMalformed": HINTS["PermanentRedirect"],
}

T = TypeVar("T")


def parts_of(url: str) -> tuple[str, str]:
    """Return bucket and prefix of `s3://bucket/prefix`; the prefix ends with `/` or is empty.

    Raises:
        StoreRefused: it does not look like that; the address is not repeated, for it may hold a secret.
    """
    found = re.fullmatch(r"s3://([A-Za-z0-9][A-Za-z0-9._-]{1,62})(?:/([^?#@]*))?", url)
    prefix = (found[2] or "").removesuffix("/") if found else ""
    if not found or (prefix and any(not part or part.startswith(".") for part in prefix.split("/"))):
        raise StoreRefused(
            "the store's address is not of the form s3://bucket/prefix: expected a bucket of 2 to 63 letters, digits, "
            "'.', '_' and '-', then parts joined by '/', none empty or starting with '.', without '?', '#' and '@'",
            hint=f"write run.store as s3://bucket/prefix, and give the credentials in {PAIR}",
        )
    return found[1], prefix + "/" if prefix else ""


def make_client(url: str, endpoint: str | None, region: str | None, connections: int) -> Any:
    """Return a boto3 client that tries once, and signs bodies only where the network is not trusted.

    Raises:
        StoreRefused: endpoint or AWS configuration cannot be used.
    """
    try:
        session = boto3.session.Session(region_name=region)
        with closing(session.client("s3", endpoint_url=endpoint)) as resolved:  # by the whole standard chain
            where = urlsplit(resolved.meta.endpoint_url)
        if where.username or where.password:
            raise StoreRefused(
                f"store {url}: the endpoint holds a user name or a password",
                hint=f"write it as http(s)://host:port, and give the credentials in {PAIR}",
            )
        amazon = (where.hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
        config = Config(
            connect_timeout=CONNECT_S,
            read_timeout=READ_S,
            max_pool_connections=connections,
            retries={"total_max_attempts": 1, "mode": "standard"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={
                "payload_signing_enabled": not (where.scheme == "https" or _is_loopback(where.hostname)),
                "addressing_style": "auto" if amazon else "path",
            },
        )
        region = session.region_name or (None if amazon else "us-east-1")
        return session.client("s3", endpoint_url=endpoint, region_name=region, config=config)
    except (BotoCoreError, ValueError) as error:
        raise StoreRefused(
            f"store {url}: the AWS configuration cannot be used ({type(error).__name__})",
            hint="check AWS_ENDPOINT_URL (http://host:port), AWS_REGION, AWS_PROFILE and the files in ~/.aws",
        ) from None


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


class Patience:
    """How long something is tried again: exponential back-off with full jitter, nothing new after `PATIENCE_S`."""

    def __init__(self) -> None:
        self._end = clock.monotonic() + PATIENCE_S
        self._longest = FIRST_PAUSE_S

    def more(self) -> bool:
        """Wait a little before the next attempt; False if there must be none."""
        pause = self._longest * (fold(0, new_id()) / 2**63)
        self._longest = min(2 * self._longest, LONGEST_PAUSE_S)
        if clock.monotonic() + pause > self._end:
            return False
        clock.sleep(pause)
        return True


def persist(act: Callable[[], T], *, unless: str = "") -> T:
    """Call `act` until it is answered; raises its last error when that will not pass, or has the code `unless`."""
    patience = Patience()
    while True:
        try:
            return act()
        except (ClientError, BotoCoreError) as error:
            if not _passes(error) or code_of(error) == unless or not patience.more():
                raise


def _passes(error: ClientError | BotoCoreError) -> bool:
    """Tell whether the same request may well succeed a little later."""
    if isinstance(error, ClientError):
        return code_of(error) in BUSY_CODES or _status(error) in BUSY
    return isinstance(error, HTTPClientError | ConnectionError | IncompleteReadError) and not isinstance(
        error, SSLError
    )


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: ClientError | BotoCoreError) -> str:
    """Return the service's code (the status where an answer has no body), or botocore's name for the error."""
    if not isinstance(error, ClientError):
        return type(error).__name__
    code = str(error.response.get("Error", {}).get("Code", ""))
    return {"412": "PreconditionFailed", "416": "InvalidRange", "404": "NoSuchKey"}.get(code, code)


def failure(error: ClientError | BotoCoreError, *, url: str, what: str, bucket: str, endpoint: str) -> StoreError:
    """Choose class and hint. Only codes and addresses are shown, never what the service or botocore wrote."""
    code, service = code_of(error), urlsplit(endpoint).netloc
    text = f"{url}: cannot {what}: {code} from {service}"
    if isinstance(error, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError):
        return StoreError(text, hint=f"set {PAIR} (or AWS_PROFILE) where everstep is started")
    if isinstance(error, SSLError):
        return StoreError(text, hint="check the service's certificate; AWS_CA_BUNDLE names one to trust")
    if isinstance(error, BotoCoreError):
        return StoreError(text, hint=f"check that {service} runs and is reachable; AWS_ENDPOINT_URL names another")
    if code == "NoSuchKey":
        return ObjectMissing(text, hint="list the run's objects to see what is")
    text += f" (HTTP {_status(error)})"
    if code in FULL_CODES:
        return StoreFull(text, hint="free some space there, or retain fewer rounds; nothing was half-written")
    hint = HINTS.get(code, f"look into the log of the service at {service}")
    return StoreError(text, hint=hint.format(bucket=bucket))


class _Reader:
    """What botocore takes for a file: it streams this, and signs it where it must, without a copy."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, count: int = -1) -> memoryview:
        """Return the next piece, larger than asked for: in the 16 KiB urllib3 asks for, a put takes twice as long."""
        end = len(self._data) if count < 0 else self._at + max(count, PIECE)
        piece = self._data[self._at : end]
        self._at += len(piece)
        return piece

    def seek(self, to: int, origin: int = 0) -> int:
        self._at = to + (0, self._at, len(self._data))[origin]
        return self._at

    def tell(self) -> int:
        return self._at


def body_of(data: memoryview) -> bytes | _Reader:
    """Return a request body; a fresh one for every attempt."""
    return bytes(data) if len(data) <= PIECE else _Reader(data)


@contextmanager
def stream_of(answer: dict[str, Any]) -> Iterator[Any]:
    """Give the body of an answer, and close it."""
    with closing(answer["Body"]) as stream:
        try:
            yield stream
        except urllib3.exceptions.HTTPError as error:  # of TLS: botocore lets that one through
            raise ResponseStreamingError(error=error) from error
