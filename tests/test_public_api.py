"""What `import gpuwatch` offers, and what it must not cost."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import gpuwatch
import pytest

CALLS = {
    "DebugUnderflowOverflow": True,
    "LightningCallback": True,
    "TrainerCallback": True,
    "detect_overflow": True,
    "env": False,
    "explain": True,
    "log_to": True,
    "watch": False,
}
"""Whether torch comes with the name; else it comes with the first call."""


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "brings_torch"), CALLS.items())
def test_a_call_is_there_and_torch_comes_with_it_and_not_before(name, brings_torch):
    if name == "LightningCallback":
        pytest.importorskip("lightning", reason="needs lightning: pip install -c constraints.txt -e '.[frameworks]'")
    assert (
        python(
            "import sys, gpuwatch\n"
            f"named = ('{name}' in gpuwatch.__all__) != '{name}'.endswith('Callback')\n"  # their packages may lack
            "before = 'torch' in sys.modules\n"
            f"from gpuwatch import {name}\n"
            f"print(named, before, {name}.__name__, gpuwatch.{name} is {name}, 'torch' in sys.modules)"
        )
        == f"True False {name} True {brings_torch}"
    )


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'gpuwatch' has no attribute 'wach'"):
        gpuwatch.wach  # noqa: B018  # for what it raises
    assert not hasattr(gpuwatch, "__wrapped__")


def test_all_is_what_dir_shows():
    assert dir(gpuwatch) == gpuwatch.__all__ == sorted(gpuwatch.__all__)


def test_type_checkers_see_every_lazy_name_where_it_comes_from():
    (block,) = [
        node
        for node in ast.parse(Path(gpuwatch.__file__).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "typing.TYPE_CHECKING"
    ]
    imports = {
        alias.name: "." * node.level + (node.module or "")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imports == gpuwatch._HOME
