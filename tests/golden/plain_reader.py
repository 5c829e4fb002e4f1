"""A reader written from `docs/formats` alone: it imports nothing of everstep's."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

MARK = b"everstep:crc32c:"
FRAME, TAG = 67108864, 16


def crc32c(data: bytes) -> str:
    return f"{google_crc32c.value(data):08x}"


# --- object.md


@dataclass
class Object:
    header: dict[str, str]
    batches: list[pa.RecordBatch]
    crc: str


def checked(data: bytes) -> str:
    """Check an object as the page says; return its checksum."""
    (schema_length,) = struct.unpack_from("<i", data, 12)
    (footer_length,) = struct.unpack_from("<i", data, len(data) - 10)
    assert data[:6] == data[-6:] == b"ARROW1"
    footer = len(data) - 10 - footer_length
    assert footer >= 16 + schema_length
    places = [data.index(MARK, 16, 16 + schema_length), data.index(MARK, footer, len(data) - 10)]
    zeroed = bytearray(data)
    stated = set()
    for place in (place + len(MARK) for place in places):
        stated.add(data[place : place + 8])
        zeroed[place : place + 8] = b"00000000"
    crc = crc32c(bytes(zeroed))
    assert stated == {crc.encode()}, f"stated {stated}, found {crc}"
    return crc


def read_object(data: bytes) -> Object:
    crc = checked(data)
    reader = pa.ipc.open_file(pa.BufferReader(data))
    header = {key.decode(): text.decode() for key, text in reader.schema.metadata.items()}
    assert header["everstep"] in ("1", "2")
    return Object(header, [reader.get_batch(index) for index in range(reader.num_record_batches)], crc)


# --- base.md, compressor.md


@dataclass
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def array(self) -> np.ndarray[Any, Any]:
        """For the dtypes that numpy has."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


def read_tensors(found: Object) -> dict[str, Tensor]:
    out = {}
    for batch in found.batches:
        for row in batch.to_pylist():
            out[row["name"]] = Tensor(row["dtype"], tuple(row["shape"]), row["data"])
    return out


# --- record.md


def digest(tensors: dict[str, Tensor]) -> str:
    """The digest of a state."""
    each = []
    for name, tensor in sorted(tensors.items()):
        what = f"torch.{tensor.dtype}{tensor.shape}".encode()
        each.append([name, hashlib.sha256(what + tensor.data).hexdigest()])
    return hashlib.sha256(json.dumps(each).encode()).hexdigest()


def read_records(found: Object) -> dict[int, dict[str, Any]]:
    """The records of a segment by lsn."""
    out: dict[int, dict[str, Any]] = {}
    for batch in found.batches:
        for row in batch.to_pylist():
            out[row["lsn"]] = row
    assert list(out) == list(range(int(found.header["everstep.first"]), int(found.header["everstep.last"]) + 1))
    return out


def places(packed: bytes, count: int) -> list[int]:
    """The places of a record's values."""
    low, rest = packed[0], packed[1:]
    cut = -(-count * low // 8)
    small, ones = bits(rest[:cut]), [at for at, one in enumerate(bits(rest[cut:])) if one]
    assert len(ones) == count
    parts = [sum(bit << place for place, bit in enumerate(small[j * low : (j + 1) * low])) for j in range(count)]
    return [(at - j << low) + part for j, (at, part) in enumerate(zip(ones, parts, strict=True))]


def bits(data: bytes) -> list[int]:
    """The bits of some bytes, the least significant of each first."""
    return [byte >> place & 1 for byte in data for place in range(8)]


def values(row: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The values of a parameter shard's record, as the optimizer consumed them."""
    found = np.array(row["values"], np.float32) if row["codes"] is None else decoded(row)
    return found if row["clip"] == 1 else found * np.float32(row["clip"])


def decoded(row: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The values that codes stand for."""
    raw = np.frombuffer(row["codes"], np.uint8)
    if row["bits"] == 8:
        codes = raw.view(np.int8).astype(np.float32)
    else:
        codes = np.stack([raw & 15, raw >> 4], 1).reshape(-1).astype(np.float32) - 8
    scale = np.repeat(np.array(row["scales"], np.float32), {8: 256, 4: 64}[row["bits"]])
    return (codes[: len(scale)] * scale[: len(codes)])[row["skip"] : row["skip"] + row["count"]]


# --- manifest.md, event.md


def read_json(data: bytes) -> dict[str, Any]:
    """A manifest or an event, its checksum checked and taken out."""
    body = dict(json.loads(data))
    stated = body.pop("crc32c", None)
    found = crc32c(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    assert stated is None or stated == found
    return body


# --- encrypted.md


def unseal(secret: bytes, name: str, data: bytes) -> bytes:
    assert data[:16] == b"EVERSTEP-AEAD-1\n"
    assert data[16:32] == hashlib.sha256(b"everstep encryption key id\0" + secret).hexdigest()[:16].encode()
    key = HKDF(SHA256(), length=32, salt=data[32:48], info=name.encode()).derive(secret)
    body, plain, index = data[48:], b"", 0
    while True:
        frame, body = body[: FRAME + TAG], body[FRAME + TAG :]
        nonce = index.to_bytes(11, "big") + (b"\0" if body else b"\1")
        plain += AESGCM(key).decrypt(nonce, frame, name.encode())
        index += 1
        if not body:
            return plain
