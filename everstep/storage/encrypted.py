r"""Objects encrypted before a store sees them; names, sizes and manifests stay readable.

A sealed object is streaming AES-256-GCM in the manner of Tink's AES-GCM-HKDF (Hoang, Reyhanitabar, Rogaway, Vizár 2015,
https://eprint.iacr.org/2015/189: "online authenticated encryption", construction STREAM):

    EVERSTEP-AEAD-1\n | key id, 16 hex digits | salt, 16 bytes | frame 0 | frame 1 | ... | last frame
    object key = HKDF-SHA256(secret, salt, info = object name), 32 bytes
    frame i    = AES-256-GCM(object key, nonce = i as 11 bytes big-endian | 1 if last else 0, associated data = name)

Every frame but the last holds `FRAME` bytes of plaintext and every frame ends in a tag of 16 bytes; an empty object is
one empty last frame. So no byte can change, no frame move, vanish or be added, and no object take another's name,
unnoticed. The key id alone is not under a tag: `unseal` tells a damaged one from another key by trying.

Not hidden: names, sizes, times and what manifests say. Not prevented: removing an object, or putting back an older one
of the same name. Whoever can write the store can also change manifests, which are neither encrypted nor signed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from everstep.core.errors import CorruptObject, SettingsError, StoreRefused
from everstep.storage.keys import MANIFESTS
from everstep.storage.store import Buffer, ObjectInfo, Pace, Store, room

VARIABLE = "EVERSTEP_ENCRYPTION_KEY"
FILE_VARIABLE = "EVERSTEP_ENCRYPTION_KEY_FILE"
FRAME = 64 << 20  # bytes of plaintext a frame; part of the format

_MAKE_ONE = 'python -c "import secrets,base64;print(base64.b64encode(secrets.token_bytes(32)).decode())"'
_SECRET = 32  # bytes
_MAGIC = b"EVERSTEP-AEAD-1\n"
_ID = 16  # hexadecimal digits
_SALT = 16
_HEAD = len(_MAGIC) + _ID + _SALT
_TAG = 16


@dataclass(frozen=True, repr=False)
class Key:
    """A secret of 32 random bytes, which no message shows, and its `id`, which anyone may know."""

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) != _SECRET:
            raise ValueError(f"an encryption key has {_SECRET} bytes, got {len(self.secret)}")

    def __repr__(self) -> str:
        return f"Key({self.id})"

    @property
    def id(self) -> str:
        """16 hexadecimal digits of a hash of the secret, used for nothing else; safe to publish."""
        return hashlib.sha256(b"everstep encryption key id\0" + self.secret).hexdigest()[:_ID]


def load_key() -> Key | None:
    """Return the key that the environment names, None if it names none.

    Raises:
        SettingsError: both variables are set, or what one names is no key. A variable that is set but empty is refused
            too: a secret that was not delivered must not turn encryption off.
    """
    text, path = os.environ.get(VARIABLE), os.environ.get(FILE_VARIABLE)
    if text is not None and path is not None:
        raise SettingsError(
            f"{VARIABLE} and {FILE_VARIABLE} are both set; expected one of them",
            hint=f"unset one, for example: unset {VARIABLE}",
        )
    if text is not None:
        return _parse(VARIABLE, text.encode(errors="replace"))
    return None if path is None else _load_file(path)


def key_for(key_id: str) -> Key:
    """Return the loaded key if it is the one with this id.

    Raises:
        StoreRefused: no key or another one is loaded.
        SettingsError: as `load_key`.
    """
    key = load_key()
    if key is None or key.id != key_id:
        raise StoreRefused(
            f"this run is encrypted: expected the key with id {key_id}, got "
            + (f"the key with id {key.id}" if key else f"none (neither {VARIABLE} nor {FILE_VARIABLE} is set)"),
            hint=f"set {VARIABLE} to that key in base64, or {FILE_VARIABLE} to the file that holds it",
        )
    return key


def seal(key: Key, name: str, data: Buffer) -> bytearray | memoryview:
    """Return `data` encrypted as the object `name`; other bytes each time.

    Args:
        key: the run's key.
        name: the object's whole name in the store, with which it is bound up.
        data: the plaintext.
    """
    plain = memoryview(data).cast("B")
    count = max(1, -(-len(plain) // FRAME))
    salt = secrets.token_bytes(_SALT)
    cipher, about = _cipher(key, name, salt), name.encode()
    out = room(_HEAD + len(plain) + count * _TAG)
    out[:_HEAD] = _MAGIC + key.id.encode() + salt
    body = memoryview(out)[_HEAD:]
    for index in range(count):
        part = plain[index * FRAME : (index + 1) * FRAME]
        start = index * (FRAME + _TAG)
        cipher.encrypt_into(_nonce(index, count), part, about, body[start : start + len(part) + _TAG])
    return out


def unseal(key: Key, name: str, data: Buffer) -> bytearray | memoryview:
    """Return the plaintext of `data`, which `seal` made; every byte of it is verified.

    Raises:
        CorruptObject: damaged, cut short, not sealed at all, or sealed under another name.
        StoreRefused: sealed with another key.
    """
    stored = memoryview(data).cast("B")
    if not _MAGIC.startswith(start := bytes(stored[: len(_MAGIC)])):
        _corrupt(name, f"expected {_MAGIC!r} at its start, got {start!r}; it is damaged or was written unencrypted")
    if len(stored) < _HEAD + _TAG:
        _corrupt(name, f"it is cut short: expected at least {_HEAD + _TAG} bytes, got {len(stored)}")
    found = bytes(stored[len(_MAGIC) : len(_MAGIC) + _ID])
    try:
        plain = _open(key, name, stored)
    except CorruptObject:
        if found != key.id.encode() and re.fullmatch(rb"[0-9a-f]+", found):
            raise _other_key(key, name, found.decode()) from None
        raise
    if found != key.id.encode():
        _corrupt(name, f"its content was sealed with key {key.id}, but its head says {found!r}")
    return plain


class EncryptedStore:
    """A store whose objects are sealed, except manifests and the objects of `store.probe`.

    Args:
        inner: where the sealed objects go.
        key: the key of every object in it.
    """

    def __init__(self, inner: Store, key: Key) -> None:
        self.inner = inner
        self.key = key
        self.url = inner.url

    @property
    def trace(self) -> Callable[[str, str], None]:
        """The inner store's, if it has one."""
        return cast(Callable[[str, str], None], cast(Any, self.inner).trace)

    @trace.setter
    def trace(self, value: Callable[[str, str], None]) -> None:
        cast(Any, self.inner).trace = value

    def put(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        """Create the object; see `Store.put`. Equal content gives other stored bytes each time."""
        self.inner.put(key, data if _is_plain(key) else seal(self.key, key, data), pace=pace)

    def get(self, key: str, start: int = 0, length: int | None = None) -> Buffer:
        """Return bytes of the object; see `Store.get`.

        A part of a sealed object costs as much as the whole: all of it is fetched, verified and decrypted first.

        Raises:
            ObjectMissing: there is no such object.
            CorruptObject: it fails its authentication.
            StoreRefused: it was sealed with another key.
            StoreError: it cannot be read.
        """
        if _is_plain(key):
            return self.inner.get(key, start, length)
        plain = unseal(self.key, key, self.inner.get(key))
        return plain[start : None if length is None else start + length] if start or length is not None else plain

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        """Return the objects under `prefix`; see `Store.list`. Sizes are those stored, so larger than the content."""
        return self.inner.list(prefix, after)

    def tops(self) -> tuple[str, ...]:
        """Return the first parts of the keys; see `Store.tops`."""
        return self.inner.tops()

    def delete(self, key: str) -> None:
        """Remove the object; see `Store.delete`."""
        self.inner.delete(key)

    def sweep(self, older_than_s: float) -> int:
        """Remove what dead writers left; see `Store.sweep`."""
        return self.inner.sweep(older_than_s)


def sealed(store: Store, key_id: str) -> Store:
    """Return the store through which a run with this key is read and written; a store that is one already is kept.

    Args:
        store: where the run lives.
        key_id: `Key.id` of the run's key; "" = the run is not encrypted, so the store itself.

    Raises:
        StoreRefused: the key is not loaded.
        SettingsError: as `load_key`.
    """
    if not key_id or (isinstance(store, EncryptedStore) and store.key.id == key_id):
        return store
    return EncryptedStore(store.inner if isinstance(store, EncryptedStore) else store, key_for(key_id))


def _is_plain(key: str) -> bool:
    """Whether the object is stored as it is: a run's manifest, read before any key is known, or a probe."""
    first, slash, path = key.partition("/")
    return path.startswith(MANIFESTS) if slash else first.startswith("probe-")


def _open(key: Key, name: str, stored: memoryview) -> bytearray | memoryview:
    """Decrypt all frames; the head is taken as it is."""
    cipher, about = _cipher(key, name, bytes(stored[_HEAD - _SALT : _HEAD])), name.encode()
    body = stored[_HEAD:]
    count = -(-len(body) // (FRAME + _TAG))
    if len(body) - (count - 1) * (FRAME + _TAG) < _TAG:
        _corrupt(name, f"it is cut short: its {len(stored)} bytes end inside the tag of frame {count - 1}")
    plain = room(len(body) - count * _TAG)
    into = memoryview(plain)
    for index in range(count):
        part = body[index * (FRAME + _TAG) : (index + 1) * (FRAME + _TAG)]
        try:
            cipher.decrypt_into(_nonce(index, count), part, about, into[index * FRAME : (index + 1) * FRAME])
        except InvalidTag:
            _corrupt(name, f"frame {index} of {count} fails its authentication ({len(stored)} bytes in all)")
    return plain


def _cipher(key: Key, name: str, salt: bytes) -> AESGCM:
    """Return the cipher under the object's own key, so that nonces need only differ within one object."""
    return AESGCM(HKDF(SHA256(), length=_SECRET, salt=salt, info=name.encode()).derive(key.secret))


def _nonce(index: int, count: int) -> bytes:
    return index.to_bytes(11, "big") + bytes([index == count - 1])


def _load_file(path: str) -> Key:
    try:
        with open(path, "rb") as file:
            content = file.read(1024)  # more than any key, and an end to a device that has none
    except (OSError, ValueError) as error:  # the value is not shown: some put the key itself there
        raise SettingsError(
            f"the file that {FILE_VARIABLE} names cannot be read ({getattr(error, 'strerror', 'not a path')})",
            hint=f"set it to the path of a file that this user can read; a key itself belongs in {VARIABLE}",
        ) from None
    return Key(content) if len(content) == _SECRET else _parse(f"{FILE_VARIABLE}: file {path!r}", content)


def _parse(source: str, text: bytes) -> Key:
    secret = _decoded(text)
    if secret is None:
        raw = f", or exactly {_SECRET} raw bytes" if source != VARIABLE else ""
        raise SettingsError(
            f"{source} holds no encryption key: expected {_SECRET} bytes in base64 (44 characters){raw}, got "
            f"{len(text.strip())} characters that are not that",
            hint=f"make a key with: {_MAKE_ONE}",
        )
    return Key(secret)


def _decoded(text: bytes) -> bytes | None:
    """Return the 32 bytes whose base64 this is, or None."""
    try:
        secret = base64.b64decode(text.strip(), validate=True)
    except binascii.Error:
        return None
    return secret if len(secret) == _SECRET else None


def _other_key(key: Key, name: str, found: str) -> StoreRefused:
    return StoreRefused(
        f"object {name} is encrypted with the key with id {found}, got the key with id {key.id}",
        hint=f"set {VARIABLE} to the key with id {found} in base64, or {FILE_VARIABLE} to the file that holds it",
    )


def _corrupt(name: str, what: str) -> NoReturn:
    raise CorruptObject(
        f"encrypted object {name} is damaged or is not what its name says: {what}",
        hint="put it back from a copy, or restore another step; everstep chain verify RUN lists what is whole",
    )
