"""Encryption: what goes in comes out, nothing else does, and no message tells the key."""

from __future__ import annotations

import base64
import hashlib
import hmac
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from everstep.core.errors import CorruptObject, EverstepError, ObjectExists, ObjectMissing, SettingsError, StoreRefused
from everstep.storage import encrypted
from everstep.storage.chain import Chain
from everstep.storage.encrypted import (
    FILE_VARIABLE,
    VARIABLE,
    EncryptedStore,
    Key,
    key_for,
    load_key,
    seal,
    sealed,
    unseal,
)
from everstep.storage.folder import FolderStore
from everstep.storage.manifests import create_object
from everstep.storage.memory import MemoryStore
from everstep.storage.store import Store, probe

FRAME = 32
TAG = 16
HEAD = 48
KEY = Key(bytes(range(1, 33)))
OTHER = Key(bytes(range(2, 34)))
NAME = "run/g000001/log/s0000/000000000001-000000000002.arrow"
TEXT = base64.b64encode(KEY.secret).decode()


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encrypted, "FRAME", FRAME)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(FILE_VARIABLE, raising=False)


@pytest.fixture(params=["memory", "folder"])
def inner(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore("encrypted") if request.param == "memory" else FolderStore(str(tmp_path / "store"))


def content(size: int) -> bytes:
    return bytes(index % 251 for index in range(size))


def naive_unseal(secret: bytes, name: str, stored: bytes) -> bytes:
    """The format in the words of the header of encrypted.py, with HKDF from RFC 5869 by hand."""
    assert stored[:16] == b"EVERSTEP-AEAD-1\n"
    prk = hmac.digest(stored[32:48], secret, "sha256")
    cipher = AESGCM(hmac.digest(prk, name.encode() + b"\1", "sha256"))
    body, plain, counter = stored[48:], b"", 0
    while True:
        frame, body = body[: FRAME + TAG], body[FRAME + TAG :]
        nonce = counter.to_bytes(11, "big") + (b"\0" if body else b"\1")
        plain += cipher.decrypt(nonce, frame, name.encode())
        counter += 1
        if not body:
            return plain


@pytest.mark.parametrize("size", [0, 1, FRAME - 1, FRAME, FRAME + 1, 2 * FRAME, 5 * FRAME + 3])
def test_what_goes_in_comes_out(inner: Store, size: int) -> None:
    store, data = EncryptedStore(inner, KEY), content(size)
    for number, form in enumerate((data, bytearray(data), memoryview(data), pa.py_buffer(data))):
        store.put(f"run/{number}", form)
        assert store.get(f"run/{number}") == data
        stored = bytes(inner.get(f"run/{number}"))
        assert len(stored) == HEAD + size + TAG * max(1, -(-size // FRAME))
        assert stored[16:32] == KEY.id.encode()
        assert naive_unseal(KEY.secret, f"run/{number}", stored) == data
        assert size < 8 or data[:8] not in stored
    assert len({bytes(inner.get(f"run/{number}")) for number in range(4)}) == 4


def test_a_buffer_of_wider_items() -> None:
    data = memoryview(content(80)).cast("d")
    assert unseal(KEY, NAME, seal(KEY, NAME, data)) == content(80)


def test_the_frame_of_the_format_is_64_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert encrypted.FRAME == 64 * 1024 * 1024


def test_parts_of_an_object(inner: Store) -> None:
    store, data = EncryptedStore(inner, KEY), content(70)
    store.put(NAME, data)
    for start, length in ((0, 0), (0, 5), (31, 2), (60, None), (60, 99), (70, 1), (99, None), (0, None)):
        stop = None if length is None else start + length
        assert store.get(NAME, start, length) == data[start:stop]


def test_it_is_a_store(inner: Store) -> None:
    store = EncryptedStore(inner, KEY)
    assert store.url == inner.url
    probe(store)
    store.put(NAME, b"first")
    with pytest.raises(ObjectExists, match="run/g0"):
        store.put(NAME, b"second")
    assert store.get(NAME) == b"first"
    assert store.list("run/") == inner.list("run/")
    assert [(info.key, info.size) for info in store.list("")] == [(NAME, HEAD + 5 + TAG)]
    store.delete(NAME)
    assert inner.list("") == []
    with pytest.raises(ObjectMissing):
        store.get(NAME)


def test_a_repeated_put_is_recognised_by_its_content(inner: Store) -> None:
    store = EncryptedStore(inner, KEY)
    data = pa.py_buffer(content(100))
    assert create_object(store, NAME, data)
    assert create_object(store, NAME, data)
    assert not create_object(store, NAME, pa.py_buffer(content(99)))


def test_a_chain_works_over_it(inner: Store) -> None:
    store = EncryptedStore(inner, KEY)
    rows = [pa.record_batch({"value": pa.array([41, 42, 43], pa.int64())})]
    chain = Chain.create(store, "run", settings={"lr": 0.1}, shards=1, exactness="bitwise")
    base, key = chain.put_base(0, 0, rows), chain.put_segment(0, 1, 3, rows)
    assert chain.add_event("fault", {"step": 2})
    again = Chain.open(EncryptedStore(inner, KEY), "run")
    assert again.manifest == chain.manifest
    assert again.read(key).batches == again.read(base).batches == rows
    assert again.events() == {"fault": {"step": 2}}
    assert Chain.take_over(store, "run", cut="common").manifest.generation == 2
    for info in inner.list(""):
        data = bytes(inner.get(info.key))
        assert data.startswith(b"{" if "/manifest/" in info.key else b"EVERSTEP-AEAD-1\n"), info.key
        assert ("/manifest/" in info.key) == (b"version" in data)
    assert Chain.open(inner, "run").manifest.version == 3  # no key needed
    with pytest.raises(StoreRefused, match=f"{KEY.id}.*{OTHER.id}"):
        Chain.open(EncryptedStore(inner, OTHER), "run").read(key)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("run/manifest/00000000000000000001.json", True),
        ("manifest/x", False),
        ("run/manifest", False),
        ("run/g000001/manifest/x", False),
        ("probe-0123", True),
        ("probe-0123/manifest/1", True),  # the manifest of a run of that name
        ("probe-0123/g000001/x", False),
        ("run/probe-0123", False),
        ("run/events/a.json", False),
    ],
)
def test_only_manifests_and_probes_are_plain(name: str, plain: bool) -> None:
    inner = MemoryStore()
    store = EncryptedStore(inner, KEY)
    store.put(name, b"content")
    assert (inner.get(name) == b"content") == plain
    assert store.get(name) == b"content"
    assert store.get(name, 3, 2) == b"te"


def test_every_flipped_byte_is_noticed() -> None:
    stored = seal(KEY, NAME, content(FRAME + 5))
    for place in range(len(stored)):
        for mask in (1, 0x80, 0xFF, 3):
            bad = bytearray(stored)
            bad[place] ^= mask
            with pytest.raises(CorruptObject, match=NAME) as caught:
                unseal(KEY, NAME, bad)
            assert caught.value.hint


@pytest.mark.parametrize("size", [0, 5, FRAME, 2 * FRAME + 5, 3 * FRAME])
def test_every_truncation_and_addition_is_noticed(size: int) -> None:
    stored = bytes(seal(KEY, NAME, content(size)))
    for length in range(len(stored)):
        with pytest.raises(CorruptObject, match=NAME):
            unseal(KEY, NAME, stored[:length])
    for more in (b"\0", bytes(TAG), stored[HEAD:], bytes(FRAME + TAG)):
        with pytest.raises(CorruptObject, match=NAME):
            unseal(KEY, NAME, stored + more)


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 2, 1], [0, 2], [1, 2], [0, 1], [0, 0, 1, 2], [0, 1, 2, 2], [2], [0]])
def test_frames_moved_dropped_or_repeated_are_noticed(order: list[int]) -> None:
    stored = seal(KEY, NAME, content(3 * FRAME))
    frames = [stored[HEAD + place :][: FRAME + TAG] for place in range(0, 3 * (FRAME + TAG), FRAME + TAG)]
    assert unseal(KEY, NAME, stored[:HEAD] + b"".join(frames)) == content(3 * FRAME)
    with pytest.raises(CorruptObject, match=r"frame \d of"):
        unseal(KEY, NAME, stored[:HEAD] + b"".join(frames[index] for index in order))


def test_a_frame_of_another_writing_is_noticed() -> None:
    first, second = (seal(KEY, NAME, content(2 * FRAME)) for _ in range(2))
    mixed = first[: HEAD + FRAME + TAG] + second[HEAD + FRAME + TAG :]
    with pytest.raises(CorruptObject, match="frame 1 of 2"):
        unseal(KEY, NAME, mixed)


def test_swapped_names_are_noticed(inner: Store) -> None:
    stored = {name: seal(KEY, name, content(10)) for name in ("run/a", "run/b")}
    inner.put("run/a", stored["run/b"])
    inner.put("run/b", stored["run/a"])
    store = EncryptedStore(inner, KEY)
    for name in stored:
        with pytest.raises(CorruptObject, match=f"{name}.*frame 0 of 1"):
            store.get(name)


def test_an_object_written_without_encryption_is_refused(inner: Store) -> None:
    inner.put(NAME, b"plain content, long enough for a head and a tag of an encrypted object")
    with pytest.raises(CorruptObject, match="written unencrypted"):
        EncryptedStore(inner, KEY).get(NAME)


def test_another_key_is_told_from_damage(inner: Store) -> None:
    EncryptedStore(inner, KEY).put(NAME, content(50))
    with pytest.raises(StoreRefused, match=f"{NAME}.*{KEY.id}.*{OTHER.id}") as caught:
        EncryptedStore(inner, OTHER).get(NAME)
    assert VARIABLE in caught.value.hint
    damaged = bytearray(inner.get(NAME))
    damaged[16:32] = OTHER.id.encode()  # says the other key, but this one opens it
    with pytest.raises(CorruptObject, match=OTHER.id):
        unseal(KEY, NAME, damaged)
    with pytest.raises(CorruptObject, match="frame 0"):
        unseal(OTHER, NAME, damaged)


class Newer(MemoryStore):
    """What the protocol's other arguments reach."""

    def __init__(self) -> None:
        super().__init__()
        self.paced: list[int] = []
        self.after = ""

    def put(self, key: str, data: object, *, pace: Callable[[int], None] | None = None) -> None:
        super().put(key, data)  # type: ignore[arg-type]
        if pace:
            pace(len(data))  # type: ignore[arg-type]

    def list(self, prefix: str, after: str = "") -> list:  # type: ignore[type-arg]
        return [info for info in super().list(prefix) if info.key > after]

    def sweep(self, older_than_s: float) -> int:
        return int(older_than_s)


def test_pace_after_and_sweep_are_passed_on() -> None:
    store, paced = EncryptedStore(Newer(), KEY), list[int]()
    store.put("run/a", b"12345", pace=paced.append)
    store.put("run/b", b"")
    assert paced == [HEAD + 5 + TAG]
    assert [info.key for info in store.list("run/", after="run/a")] == ["run/b"]
    assert store.sweep(7) == 7


def test_trace_is_the_inner_stores(tmp_path: Path) -> None:
    inner = FolderStore(str(tmp_path))
    store, seen = EncryptedStore(inner, KEY), list[tuple[str, str]]()
    assert store.inner is inner
    assert hasattr(store, "trace")
    assert not hasattr(EncryptedStore(object.__new__(Bare), KEY), "trace")
    store.trace = lambda step, key: seen.append((step, key))
    store.put(NAME, b"x")
    assert ("linked", NAME) in seen


class Bare:
    url = "bare:"


def test_a_key_is_32_bytes_and_its_id_is_its_hash() -> None:
    assert KEY.id == hashlib.sha256(b"everstep encryption key id\0" + KEY.secret).hexdigest()[:16]
    assert Key(bytes(KEY.secret)) == KEY != OTHER
    assert pickle.loads(pickle.dumps(KEY)) == KEY
    for size in (0, 16, 31, 33, 44):
        with pytest.raises(ValueError, match=f"got {size}"):
            Key(bytes(size))


def test_no_key_is_loaded_when_none_is_named() -> None:
    assert load_key() is None


@pytest.mark.parametrize("text", [TEXT, f"  {TEXT}\n"])
def test_a_key_from_the_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert load_key() == KEY == key_for(KEY.id)


@pytest.mark.parametrize("held", [KEY.secret, TEXT.encode(), TEXT.encode() + b"\r\n"])
def test_a_key_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, held: bytes) -> None:
    (tmp_path / "key").write_bytes(held)
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "key"))
    assert load_key() == KEY == key_for(KEY.id)


def test_both_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TEXT)
    monkeypatch.setenv(FILE_VARIABLE, "/somewhere")
    with pytest.raises(SettingsError, match="both set") as caught:
        load_key()
    silent(caught.value)


@pytest.mark.parametrize("text", ["", " ", "x", TEXT[:-4], TEXT + TEXT, KEY.secret.hex(), "é" + TEXT, TEXT[:20] + "!"])
@pytest.mark.parametrize("in_file", [False, True])
def test_what_is_no_key_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, in_file: bool) -> None:
    (tmp_path / "key").write_text(text, encoding="utf-8")
    if in_file:
        monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "key"))
    else:
        monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(SettingsError, match="expected 32 bytes in base64") as caught:
        load_key()
    assert 'python -c "import secrets,base64;' in caught.value.hint
    assert ("raw bytes" in caught.value.message) == in_file
    silent(caught.value)


def test_a_key_file_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in (str(tmp_path), str(tmp_path / "nothing"), "", TEXT):  # the last: the key where its path belongs
        monkeypatch.setenv(FILE_VARIABLE, path)
        with pytest.raises(SettingsError, match="cannot be read") as caught:
            load_key()
        assert VARIABLE in caught.value.hint
        silent(caught.value)


def test_an_endless_key_file_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE_VARIABLE, "/dev/zero")
    with pytest.raises(SettingsError, match="/dev/zero"):
        load_key()


def test_the_key_that_a_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreRefused, match=f"{KEY.id}, got none") as caught:
        key_for(KEY.id)
    assert VARIABLE in caught.value.hint and FILE_VARIABLE in caught.value.hint
    monkeypatch.setenv(VARIABLE, base64.b64encode(OTHER.secret).decode())
    with pytest.raises(StoreRefused, match=f"{KEY.id}, got the key with id {OTHER.id}"):
        key_for(KEY.id)


def test_the_store_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = MemoryStore()
    assert sealed(inner, "") is inner
    with pytest.raises(StoreRefused, match=KEY.id):
        sealed(inner, KEY.id)
    monkeypatch.setenv(VARIABLE, TEXT)
    store = sealed(inner, KEY.id)
    assert isinstance(store, EncryptedStore) and store.inner is inner and store.key == KEY
    assert sealed(store, KEY.id) is store and sealed(store, "") is store
    other = sealed(EncryptedStore(inner, OTHER), KEY.id)  # never sealed twice
    assert isinstance(other, EncryptedStore) and other.inner is inner and other.key == KEY


def test_nothing_shows_the_secret() -> None:
    inner = MemoryStore()
    store = EncryptedStore(inner, KEY)
    store.put(NAME, b"content")
    for shown in (
        repr(KEY),
        str(KEY),
        f"{KEY}",
        repr(store),
        str(store),
        repr({"key": KEY}),
        repr(bytes(inner.get(NAME))),
    ):
        hidden(shown)
    for key, name in ((OTHER, NAME), (KEY, "run/other")):
        with pytest.raises(EverstepError) as caught:
            unseal(key, name, inner.get(NAME))
        silent(caught.value)


def silent(error: EverstepError) -> None:
    """Neither the error, with its hint, nor what a traceback shows of it tells a key."""
    hidden("".join(traceback.format_exception(error)))
    hidden(repr(error) + str(error))


def hidden(shown: str) -> None:
    for key in (KEY, OTHER):
        for form in (repr(key.secret)[2:-1], key.secret.hex(), base64.b64encode(key.secret).decode()[:20]):
            assert form not in shown
