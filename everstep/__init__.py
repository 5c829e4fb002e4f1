"""Everstep: PyTorch training on Ray in which no finished step is lost.

The public names are imported when they are first used, so that `import everstep` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.attach import attach as attach
    from everstep.core.errors import EverstepError as EverstepError
    from everstep.core.errors import Failure as Failure
    from everstep.core.errors import UserError as UserError
    from everstep.platform.settings import JobSettings as JobSettings
    from everstep.platform.settings import load as load

__version__ = "0.1.0"

_HOMES = {
    "attach": "everstep.attach",
    "EverstepError": "everstep.core.errors",
    "UserError": "everstep.core.errors",
    "Failure": "everstep.core.errors",
    "JobSettings": "everstep.platform.settings",
    "load": "everstep.platform.settings",
}

__all__ = ["EverstepError", "Failure", "JobSettings", "UserError", "__version__", "attach", "load"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'everstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
