"""A store in an S3 bucket, on conditional writes: `If-None-Match: *` is what makes a name appear only if nobody has it.

An answer can be lost after the server did the work. So every put carries a fresh write id in the object's metadata, and
who finds the name taken looks whose id it has. Retries are made here and not in botocore, which knows nothing of that.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError, IncompleteReadError

from everstep.core import clock
from everstep.core.errors import ObjectExists, ObjectMissing, StoreError
from everstep.core.ids import new_id
from everstep.storage.s3_client import Patience, body_of, code_of, failure, make_client, parts_of, persist, stream_of
from everstep.storage.store import Buffer, ObjectInfo, Pace, check_key, room

MIB = 1 << 20
WHOLE_UP_TO = 64 * MIB  # larger objects are sent in parts
PART, LARGEST_PART, MOST_PARTS = 8 * MIB, 16 * MIB, 10_000
FIRST_READ = 8 * MIB
THREADS = 4  # of one store, for parts
CALLERS = 16  # threads that use one store at the same time without waiting for a connection

WRITE_ID = "everstep-write-id"
STEPS = ("created", "written", "linked")  # before the first byte; all parts there (only in parts); the answer has come

T = TypeVar("T")


class S3Store:
    """Objects under a prefix of a bucket.

    Args:
        url: `s3://bucket/prefix`.
        endpoint: of the service; None = AWS_ENDPOINT_URL and the rest of the standard chain.
        region: of the bucket; None = likewise.
        trace: called with each of `STEPS` and the key as a put passes it; tests crash in there. A `BaseException` that
            is no `Exception` counts as a crash: nothing is cleaned up.

    Raises:
        StoreRefused: the address, the endpoint or the AWS configuration cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        trace: Callable[[str, str], None] = lambda step, key: None,
    ) -> None:
        self.bucket, self._prefix = parts_of(url)
        self.url = f"s3://{self.bucket}/{self._prefix}".rstrip("/")
        self.trace = trace
        self._client = make_client(self.url, endpoint, region, THREADS + CALLERS)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="everstep-s3")

    def put(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        """Create the object; see `Store.put`."""
        body = memoryview(data).cast("B")
        if len(body) > (PART if pace else WHOLE_UP_TO):
            self.put_in_parts(key, body, pace=pace)
            return
        name = self._name(key)
        self.trace("created", key)
        if pace:
            pace(len(body))
        written = {WRITE_ID: new_id()}
        arguments = {"Bucket": self.bucket, "Key": name, "IfNoneMatch": "*", "Metadata": written}
        with self._telling("write", key):
            try:
                persist(lambda: self._client.put_object(Body=body_of(body), **arguments))
            except ClientError as error:
                if code_of(error) != "PreconditionFailed":
                    raise
                self._check_ours(key, written)
        self.trace("linked", key)

    def put_in_parts(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        """Create the object from parts, however small it is; see `Store.put`."""
        name, body = self._name(key), memoryview(data).cast("B")
        self.trace("created", key)
        patience = Patience()
        while not self._try_parts(key, name, body, pace):
            if not patience.more():
                raise StoreError(
                    f"{self.url}: cannot write {key}: others wrote it all the time (ConditionalRequestConflict)",
                    hint="check that one process writes this object",
                )
        self.trace("linked", key)

    def get(self, key: str, start: int = 0, length: int | None = None) -> Buffer:
        """Return bytes of the object; see `Store.get`."""
        name = self._name(key)
        ask = FIRST_READ if length is None else max(1, min(length, FIRST_READ))  # one byte, to learn if it exists
        with self._telling("read", key):
            first, size, etag = persist(lambda: self._read_first(name, start, ask))
            total = max(0, size - start if length is None else min(length, size - start))
            if total <= len(first):
                return first[:total]
            whole = room(total)
            rest = memoryview(whole)
            rest[: len(first)] = first

            def fill(at: int) -> None:
                persist(lambda: self._read_into(rest[at : at + PART], name, start + at, etag))

            self._each(fill, range(len(first), total, PART))
            return whole

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        """Return the objects under `prefix`; see `Store.list`."""
        if after > prefix and not after.startswith(prefix):
            return []
        arguments = {"Bucket": self.bucket, "Prefix": self._prefix + prefix}
        if after.startswith(prefix) and (step := _safe_start(after[len(prefix) :])):
            arguments["StartAfter"] = self._prefix + prefix + step
        with self._telling("list", prefix):
            pages = self._pages("list_objects_v2", arguments, {"ContinuationToken": "NextContinuationToken"})
            entries = [entry for page in pages for entry in page.get("Contents", ())]
        found = [
            ObjectInfo(entry["Key"][len(self._prefix) :], entry["Size"], entry["LastModified"].timestamp())
            for entry in entries
            if not entry["Key"].endswith("/")  # what consoles make for an empty folder
        ]
        kept = (info for info in found if info.key > after and info.key.startswith(prefix))  # some normalise prefixes
        return sorted(kept, key=lambda info: info.key)

    def tops(self) -> tuple[str, ...]:
        """Return the first parts of the keys; see `Store.tops`."""
        arguments = {"Bucket": self.bucket, "Prefix": self._prefix, "Delimiter": "/"}
        with self._telling("list", ""):
            pages = self._pages("list_objects_v2", arguments, {"ContinuationToken": "NextContinuationToken"})
            found = [part["Prefix"] for page in pages for part in page.get("CommonPrefixes", ())]
        return tuple(sorted(name[len(self._prefix) : -1] for name in found))

    def delete(self, key: str) -> None:
        """Remove the object; see `Store.delete`."""
        name = self._name(key)
        with contextlib.suppress(ObjectMissing), self._telling("delete", key):
            persist(lambda: self._client.delete_object(Bucket=self.bucket, Key=name))

    def sweep(self, older_than_s: float) -> int:
        """Abort the uploads of crashed puts, so that their parts are no longer kept (and paid); see `Store.sweep`."""
        limit = clock.wall() - older_than_s
        markers = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        with self._telling("sweep", "unfinished uploads"):
            pages = self._pages("list_multipart_uploads", {"Bucket": self.bucket, "Prefix": self._prefix}, markers)
            uploads = [upload for page in pages for upload in page.get("Uploads", ())]
            stale = [upload for upload in uploads if upload["Initiated"].timestamp() <= limit]
            for upload in stale:
                self._abort(upload["Key"], upload["UploadId"])
        return len(stale)

    def close(self) -> None:
        """Let go of threads and connections; the store cannot be used any more."""
        self._pool.shutdown()
        self._client.close()

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _try_parts(self, key: str, name: str, body: memoryview, pace: Pace | None) -> bool:
        """Upload and complete; False if the server wants all of it again (a conflict at completion)."""
        written = {WRITE_ID: new_id()}
        with self._telling("write", key):
            begun = persist(
                lambda: self._client.create_multipart_upload(Bucket=self.bucket, Key=name, Metadata=written)
            )
            where = {"Bucket": self.bucket, "Key": name, "UploadId": begun["UploadId"]}
            try:
                parts = self._send_parts(where, body, pace)
            except BaseException:
                self._abort_quietly(name, where["UploadId"])
                raise
            try:
                self.trace("written", key)
                return self._complete(key, where, parts, written)
            except Exception:
                self._abort_quietly(name, where["UploadId"])
                raise

    def _send_parts(self, where: dict[str, Any], body: memoryview, pace: Pace | None) -> Sequence[dict[str, Any]]:
        size = PART if pace else min(max(PART, -(-len(body) // MOST_PARTS)), LARGEST_PART)

        def send(number: int) -> dict[str, Any]:
            part = body[(number - 1) * size : number * size]
            if pace:
                pace(len(part))
            answer = persist(lambda: self._client.upload_part(PartNumber=number, Body=body_of(part), **where))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        numbers = range(1, max(1, -(-len(body) // size)) + 1)
        return [send(number) for number in numbers] if pace else self._each(send, numbers)

    def _complete(
        self, key: str, where: dict[str, Any], parts: Sequence[dict[str, Any]], written: dict[str, str]
    ) -> bool:
        """Make the name appear; False if the server says that the whole upload must be made again."""
        arguments = {"MultipartUpload": {"Parts": parts}, "IfNoneMatch": "*", **where}
        try:
            persist(lambda: self._client.complete_multipart_upload(**arguments), unless="ConditionalRequestConflict")
        except ClientError as error:
            code = code_of(error)
            if code not in ("PreconditionFailed", "NoSuchUpload", "ConditionalRequestConflict"):
                raise
            if code == "PreconditionFailed":
                self._check_ours(key, written)
            elif not self._is_ours(where["Key"], written):
                if code == "NoSuchUpload":
                    raise
                self._abort_quietly(where["Key"], where["UploadId"])
                return False
        return True

    def _check_ours(self, key: str, written: dict[str, str]) -> None:
        """Return if the object was written by this very put, whose answer was lost.

        Raises:
            ObjectExists: it is another's.
        """
        if not self._is_ours(self._name(key), written):
            raise ObjectExists(f"{self.url}: object {key} exists already", hint="read it, or use another name")

    def _is_ours(self, name: str, written: dict[str, str]) -> bool:
        try:
            answer = persist(lambda: self._client.head_object(Bucket=self.bucket, Key=name))
        except ClientError as error:
            if code_of(error) == "NoSuchKey":
                return False
            raise
        return bool(answer["Metadata"].get(WRITE_ID) == written[WRITE_ID])

    def _abort(self, name: str, upload: str) -> None:
        try:
            persist(lambda: self._client.abort_multipart_upload(Bucket=self.bucket, Key=name, UploadId=upload))
        except ClientError as error:
            if code_of(error) != "NoSuchUpload":
                raise

    def _abort_quietly(self, name: str, upload: str) -> None:
        """Abort once, best effort: the error that led here matters more, and `sweep` comes later."""
        with contextlib.suppress(ClientError, BotoCoreError):
            self._client.abort_multipart_upload(Bucket=self.bucket, Key=name, UploadId=upload)

    def _read_first(self, name: str, start: int, count: int) -> tuple[bytes, int, str]:
        """Return up to `count` bytes from `start`, the size of the object and its tag."""
        try:
            answer = self._client.get_object(Bucket=self.bucket, Key=name, Range=f"bytes={start}-{start + count - 1}")
        except ClientError as error:
            if code_of(error) == "InvalidRange":  # empty, or `start` is behind its end
                return b"", 0, ""
            raise
        with stream_of(answer) as stream:
            body: bytes = stream.read()
        if "ContentRange" not in answer:  # the server gave all of it
            return body[start:], len(body), answer["ETag"]
        return body, int(answer["ContentRange"].rpartition("/")[2]), answer["ETag"]

    def _read_into(self, into: memoryview, name: str, start: int, etag: str) -> None:
        where = f"bytes={start}-{start + len(into) - 1}"
        answer = self._client.get_object(Bucket=self.bucket, Key=name, Range=where, IfMatch=etag)
        with stream_of(answer) as stream:
            if answer["ContentLength"] != len(into):
                raise IncompleteReadError(actual_bytes=answer["ContentLength"], expected_bytes=len(into))
            while into:
                count = stream.readinto(into)  # raises if the stream ends early
                into = into[count:]

    def _pages(self, operation: str, arguments: dict[str, str], markers: dict[str, str]) -> Iterator[dict[str, Any]]:
        """Yield every page of a listing; `markers` are the arguments that continue it: where the last page has them."""
        more = True
        while more:
            page = persist(partial(getattr(self._client, operation), **arguments))
            yield page
            more = bool(page.get("IsTruncated"))
            arguments = arguments | {to: page[of] for to, of in markers.items() if page.get(of)}

    def _each(self, act: Callable[[int], T], numbers: Sequence[int]) -> Sequence[T]:
        """Do it for all numbers side by side; when one fails, those not begun are dropped and the others awaited."""
        futures = [self._pool.submit(act, number) for number in numbers]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
            wait(futures)
        for future in futures:
            if not future.cancelled():
                future.result()  # raises the first failure
        return [future.result() for future in futures]

    @contextlib.contextmanager
    def _telling(self, what: str, key: str) -> Iterator[None]:
        """Turn what botocore raises into a StoreError that names the verb and the key."""
        try:
            yield
        except (ClientError, BotoCoreError) as error:
            endpoint = self._client.meta.endpoint_url
            raise failure(
                error, url=self.url, what=f"{what} {key}".strip(), bucket=self.bucket, endpoint=endpoint
            ) from error


def _safe_start(after: str) -> str:
    """Return a place before `after` from which any server shows all that comes after it.

    Some keep folders: they list `a/b` before `a-b`, and show nothing of the folder `a` after the key `a`.
    """
    before = re.split(r"[\0-.]", after, maxsplit=1)[0]
    return before if before.endswith("/") else before[:-1]
