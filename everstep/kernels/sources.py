"""What the C library is made from: used where it is built (without torch) and where it is loaded."""

from __future__ import annotations

import zlib
from pathlib import Path

FOLDER = Path(__file__).with_name("csrc")
FLAGS = ("-O3", "-std=c11", "-fPIC", "-ffp-contract=off", "-fno-math-errno")


def files() -> list[Path]:
    """Return the C files to compile."""
    return sorted(FOLDER.glob("*.c"))


def checksum() -> str:
    """Return the checksum of the C files and headers, as the library carries it."""
    crc = 0
    for path in [*files(), *sorted(FOLDER.glob("*.h"))]:
        crc = zlib.crc32(path.name.encode() + b"\0" + path.read_bytes(), crc)
    return f"{crc:08x}"
