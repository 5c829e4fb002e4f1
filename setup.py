"""The C library of the kernels; all else stands in pyproject.toml. Without a compiler the package installs as well."""

import runpy
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent
SOURCES = runpy.run_path(str(ROOT / "everstep" / "kernels" / "sources.py"))  # importing everstep would need torch

setup(
    ext_modules=[
        Extension(
            "everstep.kernels._native",
            sources=[path.relative_to(ROOT).as_posix() for path in SOURCES["files"]()],
            depends=[path.relative_to(ROOT).as_posix() for path in SOURCES["FOLDER"].glob("*.h")],
            define_macros=[("EVERSTEP_SOURCES", f'"{SOURCES["checksum"]()}"')],
            extra_compile_args=list(SOURCES["FLAGS"]),
            optional=True,
        )
    ]
)
