"""The contract on a real server, then what only S3 has: parts, ranges, write ids, and what the service refuses."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from everstep.core.errors import ObjectExists, ObjectMissing, StoreError
from everstep.storage import s3
from everstep.storage.s3 import MIB, WRITE_ID, S3Store
from tests.s3.helpers import answer, calls, lose_first_answer, on, uploads
from tests.seaweed import BUCKET, Seaweed
from tests.store_contract import StoreContract


class TestContract(StoreContract):
    pass


class Crash(BaseException):
    """The process stops here."""


class TestParts:
    def test_a_large_object_goes_in_parts_and_comes_back_in_ranges(self, store: S3Store, seaweed: Seaweed) -> None:
        data = os.urandom(MIB) * 65 + b"tail"
        steps: list[str] = []
        store.trace = lambda step, key: steps.append(step)
        store.put("run/large", data)
        assert steps == ["created", "written", "linked"]
        whole = store.get("run/large")
        assert not memoryview(whole).readonly
        assert whole == data
        assert store.get("run/large", 5 * MIB + 3, 20 * MIB) == data[5 * MIB + 3 : 25 * MIB + 3]
        assert store.get("run/large", len(data) - 2) == b"il"
        assert store.list("")[0].size == len(data)
        with pytest.raises(ObjectExists, match="run/large"):
            store.put("run/large", bytes(s3.WHOLE_UP_TO + 1))
        assert store.get("run/large", 0, 100) == data[:100]
        assert uploads(seaweed, store) == []

    def test_completion_creates_only(self, store: S3Store, seaweed: Seaweed) -> None:
        store.put("a", b"first")
        with pytest.raises(ObjectExists, match="a exists"):
            store.put_in_parts("a", b"second")
        assert store.get("a") == b"first"
        store.put_in_parts("b", b"")
        assert store.get("b") == b""
        assert uploads(seaweed, store) == []

    def test_paced_parts_go_one_after_another(self, store: S3Store) -> None:
        asked: list[int] = []
        data = os.urandom(s3.PART) * 2 + b"tail"
        store.put("paced", data, pace=asked.append)
        assert asked == [s3.PART, s3.PART, 4]
        assert store.get("paced") == data

    @pytest.mark.parametrize("kind", [RuntimeError, Crash])
    def test_pace_stops_a_put_in_the_middle(self, store: S3Store, seaweed: Seaweed, kind: type[BaseException]) -> None:
        left = [1]

        def pace(count: int) -> None:
            if not left:
                raise kind("stop")
            left.pop()

        with pytest.raises(kind, match="stop"):
            store.put("paced", bytes(2 * s3.PART), pace=pace)
        assert store.list("") == []
        assert uploads(seaweed, store) == []

    def test_a_part_that_fails_leaves_nothing(self, store: S3Store, seaweed: Seaweed) -> None:
        on(store, "before-send.s3.UploadPart", lambda request, **_: answer(403, "AccessDenied"))
        with pytest.raises(StoreError, match="AccessDenied"):
            store.put("large", bytes(s3.WHOLE_UP_TO + 1))
        assert store.list("") == []
        assert uploads(seaweed, store) == []

    def test_a_conflict_at_completion_sends_all_of_it_again(self, store: S3Store, seaweed: Seaweed) -> None:
        left = [1]
        conflict = answer(409, "ConditionalRequestConflict")
        on(
            store,
            "before-send.s3.CompleteMultipartUpload",
            lambda request, **_: conflict if left and left.pop() else None,
        )
        begun = calls(store, "CreateMultipartUpload")
        store.put_in_parts("a", b"data")
        assert len(begun) == 2
        assert store.get("a") == b"data"
        assert uploads(seaweed, store) == []

    @pytest.mark.parametrize("step", s3.STEPS)
    def test_a_crash_leaves_no_name_or_all_of_it(self, store: S3Store, seaweed: Seaweed, step: str) -> None:
        def trace(at: str, key: str) -> None:
            if at == step:
                raise Crash

        store.trace = trace
        with pytest.raises(Crash):
            store.put_in_parts("a", b"data")
        assert [info.key for info in store.list("")] == (["a"] if step == "linked" else [])
        assert len(uploads(seaweed, store)) == (step == "written")
        assert store.sweep(3600) == 0
        assert store.sweep(-2) == (step == "written")  # its clock counts whole seconds
        assert uploads(seaweed, store) == []

    def test_sweep_keeps_to_its_prefix(self, store: S3Store, seaweed: Seaweed) -> None:
        client = seaweed.client()
        for key in ("other/a", "prefix-2/a"):
            client.create_multipart_upload(Bucket=BUCKET, Key=key)
        assert store.sweep(-2) == 0


class TestWriteId:
    @pytest.mark.parametrize("in_parts", [False, True])
    def test_a_lost_answer_is_recognised(self, store: S3Store, in_parts: bool) -> None:
        lost = lose_first_answer(store, "CompleteMultipartUpload" if in_parts else "PutObject")
        (store.put_in_parts if in_parts else store.put)("a", b"mine")
        assert lost == [200]
        assert store.get("a") == b"mine"

    @pytest.mark.parametrize("in_parts", [False, True])
    def test_a_foreign_object_is_not_taken_for_ours(self, store: S3Store, in_parts: bool, seaweed: Seaweed) -> None:
        store.put("a", b"mine")  # even the same bytes
        lost = lose_first_answer(store, "CompleteMultipartUpload" if in_parts else "PutObject")
        with pytest.raises(ObjectExists):
            (store.put_in_parts if in_parts else store.put)("a", b"mine")
        assert lost == [412]
        assert uploads(seaweed, store) == []

    def test_an_upload_gone_after_a_lost_answer(self, store: S3Store) -> None:
        """Other servers say NoSuchUpload where SeaweedFS says PreconditionFailed."""
        lost = lose_first_answer(store, "CompleteMultipartUpload")
        gone = answer(404, "NoSuchUpload")
        on(store, "before-send.s3.CompleteMultipartUpload", lambda request, **_: gone if lost else None)
        store.put_in_parts("a", b"mine")
        assert store.get("a") == b"mine"

    def test_every_put_has_an_id_of_its_own(self, store: S3Store, seaweed: Seaweed) -> None:
        store.put("a", b"x")
        store.put_in_parts("b", b"x")
        prefix = store.url.removeprefix(f"s3://{BUCKET}/")
        heads = [seaweed.client().head_object(Bucket=BUCKET, Key=f"{prefix}/{key}") for key in "ab"]
        ids = {head["Metadata"][WRITE_ID] for head in heads}
        assert len(ids) == 2


class TestOthers:
    def test_eight_clients_create_one_winner(self, s3_url: str) -> None:
        stores = [S3Store(s3_url) for _ in range(8)]
        won: list[int] = []
        gate = threading.Barrier(8)

        def write(number: int) -> None:
            put = stores[number].put_in_parts if number % 2 else stores[number].put
            gate.wait()
            for round_ in range(5):
                try:
                    put(f"same{round_}", str(number).encode())
                    won.append(round_)
                except ObjectExists:
                    pass

        threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won) == list(range(5))
        for opened in stores:
            opened.close()

    def test_a_listing_of_many_pages(self, store: S3Store) -> None:
        keys = [f"a-{number:02d}/x" for number in range(7)]
        for key in keys:
            store.put(key, b"x")
        on(store, "before-parameter-build.s3.ListObjectsV2", lambda params, **_: params.update(MaxKeys=3))
        assert [info.key for info in store.list("")] == keys
        assert [info.key for info in store.list("a-", "a-02/x")] == keys[3:]

    def test_an_object_replaced_under_a_read(self, store: S3Store, seaweed: Seaweed, monkeypatch: Any) -> None:
        monkeypatch.setattr(s3, "FIRST_READ", 4)
        store.put("a", b"0123456789")
        on(
            store,
            "before-send.s3.GetObject",
            lambda request, **_: replace() if b"bytes=4-" in request.headers["Range"] else None,
        )

        def replace() -> None:
            key = store.url.removeprefix(f"s3://{BUCKET}/") + "/a"
            seaweed.client().put_object(Bucket=BUCKET, Key=key, Body=b"abcdefghij")

        with pytest.raises(StoreError, match="PreconditionFailed"):
            store.get("a")

    def test_a_server_that_ignores_ranges(self, store: S3Store) -> None:
        store.put("a", b"0123456789")
        on(store, "before-sign.s3.GetObject", lambda request, **_: request.headers.__delitem__("Range"))
        assert store.get("a") == b"0123456789"
        assert store.get("a", 3, 4) == b"3456"

    def test_missing_while_read(self, store: S3Store) -> None:
        with pytest.raises(ObjectMissing, match="run/nothing"):
            store.get("run/nothing", 0, 0)
