"""after_import, each time in a fresh process: a stand-in named `late` is what torch is in real life."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture
def run(tmp_path):
    package = tmp_path / "late"
    package.mkdir()
    (package / "__init__.py").write_text("import sys\nprint('late begins')\nfrom . import part\nvalue = 7\n")
    (package / "part.py").write_text("print('part')\n")
    (tmp_path / "broken.py").write_text("raise ValueError('broken')\n")

    def run(code: str) -> list[str]:
        prelude = (
            "import sys; from gpuwatch.worker.patches import after_import\n"
            "def then(): print('then', sys.modules['late'].value)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", prelude + code], cwd=tmp_path, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:-1]

    return run


IMPORTED = ["late begins", "part", "then 7"]


def test_it_is_called_once_when_the_import_has_finished(run):
    assert run("after_import('late', then)\nimport late\nimport late.part\nimport late\nprint('end')") == [
        *IMPORTED,
        "end",
    ]


def test_without_an_import_it_is_never_called(run):
    assert run("after_import('late', then)\nimport json") == []


def test_one_who_gives_up_is_not_called_and_not_kept(run):
    code = (
        "import gc, weakref\n"
        "class Hooks:\n"
        "    def begin(self): print('begin')\n"
        "hooks = Hooks()\n"
        "kept = weakref.ref(hooks)\n"
        "give_up = after_import('late', hooks.begin)\n"
        "give_up()\n"
        "del hooks, give_up\n"
        "gc.collect()\n"
        "print(kept())\n"
        "import late"
    )
    assert run(code) == ["None", "late begins", "part"]


def test_a_module_that_is_there_already_calls_at_once(run):
    assert run("import late\nafter_import('late', then)") == IMPORTED


def test_the_import_of_a_part_alone_is_an_import_of_the_package(run):
    assert run("after_import('late', then)\nfrom late.part import __name__ as name\nprint(name)") == [
        *IMPORTED,
        "late.part",
    ]


def test_asking_whether_it_is_installed_does_not_use_it_up(run):
    """transformers and accelerate call find_spec('torch') before anything imports torch."""
    code = "from importlib.util import find_spec\nassert find_spec('late') and find_spec('late')\nimport late"
    assert run(f"after_import('late', then)\n{code}") == IMPORTED


def test_the_module_looks_as_if_nobody_had_been_there(run):
    code = (
        "import importlib.machinery, inspect\n"
        "before = list(sys.meta_path)\nafter_import('late', then)\nimport late\n"
        "loader = late.__loader__\n"
        "print(type(loader) is importlib.machinery.SourceFileLoader, late.__spec__.loader is loader)\n"
        "print('value = 7' in inspect.getsource(late), sys.meta_path == before, loader.is_package('late'))\n"
    )
    assert run(code)[3:] == ["True True", "True True True"]


def test_an_import_that_fails_fails_as_ever(run):
    code = "after_import('broken', then)\ntry:\n    import broken\nexcept ValueError as error:\n    print(error)\n"
    assert run(code) == ["broken"]


def test_a_missing_module_is_missing(run):
    code = "after_import('nowhere', then)\ntry:\n    import nowhere\nexcept ImportError as error:\n    print(error)\n"
    assert run(code) == ["No module named 'nowhere'"]
