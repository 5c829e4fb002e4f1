"""A server that is frozen, killed, overloaded or not what it should be; and that nothing secret is ever told."""

from __future__ import annotations

import os
import time
import traceback
from typing import Any

import pytest

from everstep.core.errors import EverstepError, StoreError, StoreRefused
from everstep.storage import s3_client
from everstep.storage.s3 import S3Store
from everstep.storage.store import open_store, probe
from tests.s3.helpers import answer, calls, on, uploads
from tests.seaweed import SECRET_KEY, Seaweed, free_ports

SECRET = "a-secret-nobody-may-see"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> float:
    """Shorter patience; returns the longest time a failing request may take."""
    monkeypatch.setattr(s3_client, "PATIENCE_S", 2.0)
    monkeypatch.setattr(s3_client, "READ_S", 1.0)
    monkeypatch.setattr(s3_client, "CONNECT_S", 1.0)
    return 2.0 + 1.0 + 1.0 + 0.5


class TestServer:
    def test_a_frozen_server_fails_in_bounded_time_and_works_after(
        self, hasty: float, s3_url: str, seaweed: Seaweed
    ) -> None:
        store = S3Store(s3_url)
        store.put("before", b"x")
        seaweed.stop()
        try:
            for act in (
                lambda: store.put("run/a", b"data"),
                lambda: store.get("before"),
                lambda: store.list(""),
                lambda: store.put("run/large", bytes(9 << 20), pace=lambda count: None),
            ):
                begun = time.monotonic()
                with pytest.raises(StoreError, match="ReadTimeoutError") as caught:
                    act()
                assert time.monotonic() - begun < hasty
                assert "reachable" in caught.value.hint
        finally:
            seaweed.cont()
        store.put("run/b", b"data")
        assert store.get("run/b") == b"data"
        store.close()

    def test_what_was_put_survives_a_kill(self, store: S3Store, seaweed: Seaweed) -> None:
        small, large = os.urandom(1000), os.urandom(9 << 20)
        store.put("run/small", small)
        store.put("run/large", large, pace=lambda count: None)
        seaweed.kill()
        seaweed.restart()
        assert store.get("run/small") == small
        assert store.get("run/large") == large
        assert [info.key for info in store.list("")] == ["run/large", "run/small"]

    @pytest.mark.parametrize("code", ["SlowDown", "InternalError", "ConditionalRequestConflict", "RequestTimeout"])
    def test_a_burst_does_not_surface(self, store: S3Store, code: str) -> None:
        status = {"SlowDown": 503, "InternalError": 500, "ConditionalRequestConflict": 409, "RequestTimeout": 400}[code]
        left = [answer(status, code) for _ in range(3)]
        asked = calls(store, "PutObject")
        for operation in ("PutObject", "GetObject", "ListObjectsV2", "DeleteObject"):
            on(store, f"before-send.s3.{operation}", lambda request, **_: left.pop() if left else None)
        store.put("a", b"data")
        assert len(asked) == 4
        for act in (lambda: store.get("a"), lambda: store.list(""), lambda: store.delete("a")):
            left.extend(answer(status, code) for _ in range(2))
            act()
        assert left == []

    def test_patience_ends(self, hasty: float, store: S3Store) -> None:
        on(store, "before-send.s3.*", lambda request, **_: answer(503, "SlowDown"))
        with pytest.raises(StoreError, match=r"write run/a: SlowDown from .* \(HTTP 503\)"):
            store.put("run/a", b"data")

    def test_a_full_service(self, store: S3Store) -> None:
        on(store, "before-send.s3.PutObject", lambda request, **_: answer(403, "QuotaExceeded"))
        with pytest.raises(StoreError, match="QuotaExceeded") as caught:
            store.put("run/a", b"data")
        assert type(caught.value).__name__ == "StoreFull"


class TestProbe:
    def test_probe_is_content(self, s3_url: str, seaweed: Seaweed) -> None:
        store = open_store(s3_url)
        assert isinstance(store, S3Store)
        assert store.url == s3_url
        probe(store)
        assert store.list("") == []
        assert uploads(seaweed, store) == []
        store.close()

    @pytest.mark.parametrize(
        ("operation", "why"), [("PutObject", "only once,"), ("CompleteMultipartUpload", "sent in parts,")]
    )
    def test_no_conditional_writes(self, store: S3Store, seaweed: Seaweed, operation: str, why: str) -> None:
        on(store, f"before-sign.s3.{operation}", lambda request, **_: request.headers.__delitem__("If-None-Match"))
        with pytest.raises(StoreRefused, match=f"{why} so a second writer") as caught:
            probe(store)
        assert "conditional writes" in caught.value.hint
        assert store.list("") == []
        assert uploads(seaweed, store) == []

    def test_conditional_writes_not_implemented(self, store: S3Store) -> None:
        on(store, "before-send.s3.PutObject", lambda request, **_: answer(501, "NotImplemented"))
        with pytest.raises(StoreRefused, match="NotImplemented") as caught:
            probe(store)
        assert "conditional writes" in caught.value.hint

    @pytest.mark.parametrize(
        ("environment", "code", "hint"),
        [
            ({"AWS_SECRET_ACCESS_KEY": SECRET}, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"),
            ({"AWS_ACCESS_KEY_ID": "unknown"}, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"),
        ],
    )
    def test_wrong_credentials(
        self, s3_url: str, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], code: str, hint: str
    ) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        refused(s3_url, code, hint)

    def test_no_credentials(self, s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        refused(s3_url, "NoCredentialsError", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")

    def test_missing_bucket(self, s3_url: str) -> None:
        refused("s3://no-such-bucket/prefix", "NoSuchBucket", "create the bucket no-such-bucket")

    @pytest.mark.usefixtures("hasty")
    def test_unreachable_endpoint(self, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        endpoint = f"127.0.0.1:{free_ports(1)[0]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{endpoint}")
        refused(s3_url, f"EndpointConnectionError from {endpoint}", "AWS_ENDPOINT_URL")


class TestAddress:
    @pytest.mark.parametrize(
        "url",
        [
            "s3:",
            "s3://",
            "s3:bucket",
            "s3://bucket//a",
            "s3://bucket/../a",
            f"s3://key:{SECRET}@bucket/a",
            f"s3://bucket/a?x={SECRET}",
        ],
    )
    def test_addresses_that_are_refused(self, url: str) -> None:
        with pytest.raises(StoreRefused, match="s3://bucket/prefix") as caught:
            open_store(url)
        nothing_secret(caught.value)

    def test_a_bucket_alone(self, s3_url: str) -> None:
        for url in ("s3://bucket", "s3://bucket/"):
            store = S3Store(url)
            assert store.url == "s3://bucket"
            key = s3_url.removeprefix("s3://bucket/") + f"/{len(url)}"
            store.put(key, b"x")
            assert [info.key for info in store.list(key)] == [key]
            store.close()

    @pytest.mark.parametrize("endpoint", ["nonsense", f"http://key:{SECRET}@127.0.0.1:1"])
    def test_endpoints_that_are_refused(self, s3_url: str, endpoint: str) -> None:
        with pytest.raises(StoreRefused, match="endpoint|AWS configuration") as caught:
            open_store(s3_url, endpoint=endpoint)
        nothing_secret(caught.value)

    @pytest.mark.parametrize(
        ("endpoint", "signed", "style"),
        [
            ("http://127.0.0.1:1", False, "path"),
            ("http://localhost:1", False, "path"),
            ("https://minio.example", False, "path"),
            ("http://minio.example", True, "path"),
            ("https://s3.eu-north-1.amazonaws.com", False, "auto"),
        ],
    )
    def test_bodies_are_signed_where_the_network_is_not_trusted(
        self, s3_url: str, endpoint: str, signed: bool, style: str
    ) -> None:
        store = S3Store(s3_url, endpoint=endpoint, region="eu-north-1")
        config = store._client.meta.config
        assert config.s3 == {"payload_signing_enabled": signed, "addressing_style": style}
        assert config.retries["total_max_attempts"] == 1
        assert store._client.meta.region_name == "eu-north-1"
        store.close()

    def test_signed_bodies_are_accepted(self, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3_client, "_is_loopback", lambda host: False)
        store = S3Store(s3_url)
        data = os.urandom(3 << 20)
        store.put("a", data)
        store.put_in_parts("b", data)
        assert store.get("a") == store.get("b") == data
        store.close()


def refused(url: str, code: str, hint: str) -> None:
    """Probe, and expect to be told this."""
    store = open_store(url)
    assert isinstance(store, S3Store)
    with pytest.raises(StoreRefused, match=code) as caught:
        probe(store)
    assert hint in caught.value.hint
    assert url in caught.value.message
    nothing_secret(caught.value)
    assert SECRET not in repr(vars(store))
    assert SECRET_KEY not in repr(vars(store))
    store.close()


def nothing_secret(error: EverstepError) -> None:
    told = "".join(traceback.format_exception(error)) + repr(error) + str(error)
    cause: BaseException | None = error
    while cause is not None:
        told += repr(vars(cause))
        cause = cause.__cause__ or cause.__context__
    for secret in (SECRET, SECRET_KEY):
        assert secret not in told
