"""A script run by us against the same script run by Python: every difference that a user could see is a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from gpuwatch.core.codes import RANK_OVERFLOW

pytestmark = pytest.mark.quick_here(6)

DRIVER = (
    "import os, sys\n"
    "if not getattr(sys.flags, 'safe_path', False): del sys.path[0]  # as core/guest/start.py does\n"
    "from gpuwatch.worker.__main__ import run\n"
    "def told(what): print('TOLD', what, file=open('told', 'a'))\n"
    "run(sys.argv[1:], lambda error: told(type(error).__name__), told)\n"
)


class Both:
    """Runs a script plainly and by us, in the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, code: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(code))
        return path

    def __call__(self, *arguments: str, flags: tuple[str, ...] = (), cwd: Path | None = None):
        def start(*front: str):
            return subprocess.run(
                [sys.executable, *flags, *front, *arguments],
                cwd=cwd or self.folder,
                capture_output=True,
                text=True,
                timeout=600,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            )

        return start(), start("-c", DRIVER)

    def same(self, *arguments: str, **more):
        """Both runs are alike in exit code, stdout and stderr. Returns ours."""
        plain, ours = self(*arguments, **more)
        assert ours.stdout == plain.stdout
        assert ours.stderr == plain.stderr
        assert ours.returncode == plain.returncode
        return ours

    @property
    def told(self) -> list[str]:
        return (self.folder / "told").read_text().split()[1::2]


@pytest.fixture
def both(tmp_path) -> Both:
    return Both(tmp_path)


SEEN = """
import json, sys, os
import __main__
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path0": sys.path[0], "package": __package__,
    "spec": repr(__spec__ and __spec__.name), "doc": __doc__, "globals": sorted(globals()),
    "loader": type(__loader__).__name__,
    "builtins": type(__builtins__).__name__, "main": __main__.__dict__ is globals(), "cwd": os.getcwd(),
    "excepthook": sys.excepthook is sys.__excepthook__, "signal": repr(__import__("signal").getsignal(2)),
}))
"""


def test_a_script_sees_what_python_would_show_it(both):
    both.write("train.py", '"""Doc."""\n' + SEEN)
    seen = json.loads(both.same("train.py", "--lr", "1e-4", "a b", "").stdout)
    assert seen["argv"] == ["train.py", "--lr", "1e-4", "a b", ""]
    assert seen["name"] == "__main__"
    assert both.told == ["0"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["my train.py", "tr'ain;$(x).py", "näh.py", "folder/train.py", "./folder/../train.py"])
def test_any_path_of_a_script(both, name):
    (both.folder / "folder").mkdir()
    both.write(name, SEEN)
    both.same(name)
    both.same(str(both.folder / name))


def test_a_link_to_a_script_finds_the_modules_beside_the_script(both):
    both.write("real/helper.py", "x = 1\n")
    real = both.write("real/train.py", SEEN + "import helper\n")
    (both.folder / "link.py").symlink_to(real)
    assert both.same("link.py").returncode == 0


def test_isolated_paths_stay_isolated(both):
    both.write("train.py", SEEN)
    both.same("train.py", flags=("-P",))


def test_a_module_sees_what_python_would_show_it(both):
    both.write("package/__init__.py", "print('package')\n")
    both.write("package/train.py", SEEN)
    both.write("package/__main__.py", SEEN)
    assert json.loads(both.same("-m", "package.train", "--lr", "1").stdout.split("\n")[1])["spec"] == "'package.train'"
    both.same("-m", "package", "x")


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_a_folder_or_zip_with_a_main_is_run(both, kind):
    main = both.write("app/__main__.py", "import sys, helper; print(__name__, sys.argv, sys.path[0], helper.x)\n")
    both.write("app/helper.py", "x = 5\n")
    if kind == "zip":
        import zipfile

        with zipfile.ZipFile(both.folder / "app.zip", "w") as archive:
            for path in main.parent.glob("*.py"):
                archive.write(path, path.name)
    both.same("app" if kind == "folder" else "app.zip", "x")


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("", 0, "0"),
        ("sys.exit()", 0, "0"),
        ("sys.exit(0)", 0, "0"),
        ("sys.exit(3)", 3, "3"),
        ("sys.exit(True)", 1, "1"),
        ("sys.exit('text')", 1, "1"),
        ("raise SystemExit(None)", 0, "0"),
        ("os._exit(7)", 7, None),
        ("raise ValueError('boom')", 1, "ValueError"),
        ("assert False", 1, "AssertionError"),
        ("import nowhere_to_be_found", 1, "ModuleNotFoundError"),
        ("raise ExceptionGroup('g', [ValueError(1), KeyError(2)])", 1, "ExceptionGroup"),
        ("os.kill(os.getpid(), 9)", -9, None),
    ],
)
def test_every_end_of_a_script(both, end, code, told):
    both.write("train.py", f"import os, sys, atexit\natexit.register(print, 'at exit')\nprint('begin')\n{end}\n")
    assert both.same("train.py").returncode == code
    if told is not None:
        assert both.told == [told]


ABORTS_LAST = """
import atexit, ctypes, threading, time
from gpuwatch.core.errors import JobEnded, OverflowDetected
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)  # as the destructors of a process group may
atexit.register(print, "at exit")
def work():
    time.sleep(0.2)
    print("the thread is through")
threading.Thread(target=work).start()
print("begin")
"""


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("raise JobEnded(0)", 0, "0"),
        ("raise OverflowDetected('inf')", RANK_OVERFLOW, "OverflowDetected"),
        ("raise SystemExit(0)", -signal.SIGABRT, "0"),
    ],
)
def test_where_we_end_the_job_no_destructor_has_the_last_word(both, end, code, told):
    both.write("train.py", ABORTS_LAST + end)
    plain, ours = both("train.py")
    assert ours.returncode == code
    assert ours.stdout == plain.stdout == "begin\nthe thread is through\nat exit\n"
    assert both.told == [told]
    assert ("gpuwatch.core.errors.OverflowDetected: inf" in ours.stderr) == (code == RANK_OVERFLOW)


RAISES = """
def inner(x):
    raise RuntimeError("näh\\n second line")
def outer():
    try:
        1 / 0
    except ZeroDivisionError as error:
        inner(3)
outer()
"""


def test_a_traceback_is_exactly_pythons(both):
    both.write("train.py", RAISES)
    both.write("package/__init__.py", "")
    both.write("package/train.py", RAISES)
    assert "During handling" in both.same("train.py").stderr
    both.same("-m", "package.train")


@pytest.mark.quick(1)
@pytest.mark.parametrize("code", ["x = = 1\n", "\0\n", "# -*- coding: nope -*-\n", "def f(:\n  pass"])
def test_a_script_that_does_not_compile(both, code):
    both.write("train.py", "").write_bytes(code.encode())
    plain, ours = both("train.py")
    assert ours.returncode == plain.returncode == 1
    assert ours.stderr.splitlines()[-1].split(":")[0] == plain.stderr.splitlines()[-1].split(":")[0]


@pytest.mark.parametrize("code", ["x = = 1\n", "def f(:\n  pass"])
def test_a_syntax_error_is_printed_as_python_prints_it(both, code):
    both.write("train.py", code)
    both.same("train.py")


def test_a_source_in_another_encoding_is_read_by_its_own_comment(both):
    both.write("train.py", "").write_bytes("# -*- coding: latin-1 -*-\nprint(ascii('é'))\n".encode("latin-1"))
    both.same("train.py")


def test_a_script_that_is_not_there(both):
    assert both.same("nowhere.py").returncode == 2


def test_the_users_own_excepthook_is_called(both):
    both.write(
        "train.py", "import sys\nsys.excepthook = lambda kind, error, tb: print('mine', error)\nraise ValueError(1)\n"
    )
    assert both.same("train.py").stdout == "mine 1\n"


def test_an_excepthook_that_exits_chooses_the_code(both):
    both.write("train.py", "import sys\nsys.excepthook = lambda *_: sys.exit(5)\nraise ValueError(1)\n")
    plain, ours = both("train.py")
    assert ours.returncode == plain.returncode


def test_the_end_waits_for_threads_and_runs_atexit(both):
    both.write(
        "train.py",
        """
        import atexit, threading, time
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
        raise ValueError("boom")
        """,
    )
    assert both.same("train.py").stdout == "thread\nat exit\n"


def test_a_keyboard_interrupt_dies_of_the_signal(both):
    both.write("train.py", "import atexit\natexit.register(print, 'at exit')\nraise KeyboardInterrupt\n")
    assert both.same("train.py").returncode == -signal.SIGINT
    assert both.told == ["KeyboardInterrupt"]


def test_a_real_interrupt_reaches_the_scripts_own_handler(both):
    both.write(
        "train.py", "import os\ntry:\n    os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt:\n    print('caught')\n"
    )
    assert both.same("train.py").stdout == "caught\n"


POOL = """
import multiprocessing
def double(x):
    return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(pool.map(double, [1, 2, 3]))
"""


def test_a_spawned_pool_finds_the_functions_of_the_script(both):
    both.write("my train.py", POOL)
    assert both.same("my train.py").stdout == "[2, 4, 6]\n"


def test_a_spawned_pool_finds_the_functions_of_a_module(both):
    both.write("package/__init__.py", "")
    both.write("package/train.py", POOL)
    assert both.same("-m", "package.train").stdout == "[2, 4, 6]\n"


def test_what_pickle_calls_main_is_the_script(both):
    both.write("train.py", "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)\n")
    assert both.same("train.py").stdout == "True\n"


def test_an_observer_that_fails_does_not_change_the_scripts_end(both):
    """Our own error while we take note of the user's must not take its place."""
    both.write("train.py", "raise ValueError('boom')\n")
    driver = DRIVER.replace("lambda error: told(type(error).__name__)", "lambda error: 1 / 0")
    ours = subprocess.run(
        [sys.executable, "-c", driver, "train.py"], cwd=both.folder, capture_output=True, text=True, timeout=600
    )
    plain, _ = both("train.py")
    assert (ours.returncode, ours.stderr) == (1, plain.stderr)
