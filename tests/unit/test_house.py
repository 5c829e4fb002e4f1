"""The house stands: names do not collide, arrows point down, every error travels."""

from __future__ import annotations

import ast
import inspect
import pickle
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import everstep
from everstep.core import errors

PACKAGE = Path(everstep.__file__).parent
ROOT = PACKAGE.parent
MAY_IMPORT_RAY = ("actors/", "tune_jobs/", "attach.py", "cli.py")
ERRORS = [thing for _, thing in inspect.getmembers(errors, inspect.isclass) if issubclass(thing, errors.EverstepError)]


def test_the_standard_platform_module_is_not_hidden() -> None:
    assert platform.system()
    assert not (ROOT / "platform").exists()
    assert not (ROOT / "platform.py").exists()


def test_the_package_folder_is_not_on_the_path() -> None:
    assert str(PACKAGE) not in [str(Path(entry).resolve()) for entry in sys.path]


def test_no_module_at_the_top_takes_a_standard_name() -> None:
    taken = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()} - {"__pycache__"}
    assert taken & sys.stdlib_module_names == {"platform"}


def test_ray_is_imported_only_in_the_body() -> None:
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).as_posix()
        if not room.startswith(MAY_IMPORT_RAY):
            assert "ray" not in _imported(path), f"{room} imports ray"


def test_storage_platform_and_core_import_no_torch() -> None:
    for room in ("storage", "platform", "core"):
        for path in (PACKAGE / room).rglob("*.py"):
            assert "torch" not in _imported(path), f"{path.name} imports torch"


def test_importing_the_package_and_the_command_is_cheap() -> None:
    code = "import sys, everstep, everstep.cli, everstep.platform.settings; print({'torch', 'ray'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_survives_pickling(kind: type[errors.EverstepError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what happened", hint="what to do")))
    assert type(error) is kind
    assert (error.message, error.hint) == ("what happened", "what to do")
    assert kind.__name__ in (errors.__doc__ or "")


def test_public_names_resolve() -> None:
    for name in everstep.__all__:
        assert getattr(everstep, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = everstep.nothing


def _imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found
