"""What every test must leave as it found it: hooks, threads, and gpuwatch's variables. Which tests run. And a stand-in
for NVML."""

from __future__ import annotations

import gc
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode adds no folder

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what it puts into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

import once_more
import sampling

settings.register_profile(  # no figure of a machine's speed, and the same examples every time; the soak takes new ones
    "gate", deadline=None, max_examples=50, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("soak", deadline=None, max_examples=1000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gate")


def pytest_addoption(parser: pytest.Parser) -> None:
    sampling.add_options(parser)
    once_more.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    once_more.configure(config)
    gc.disable()  # until all is collected: a fifth of the time that takes would go into looks for garbage


def pytest_report_header(config: pytest.Config) -> str:
    return sampling.header(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return sampling.is_left_out(config, collection_path) or None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    once_more.keep_only(config, items)
    sampling.mark_slow(config, items)
    yield  # -m and -k
    sampling.take_sample(config, items)
    sampling.limit_time(config, items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    sampling.tell_not_begun(config, terminalreporter)


def pytest_collection_finish() -> None:
    """The tests themselves are never garbage: who looks for garbage from now on does not look at them."""
    gc.freeze()
    gc.enable()


_HOOK_TABLES = {
    "torch.nn.modules.module": (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_forward_hooks_always_called",
        "_global_forward_hooks_with_kwargs",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
    ),
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
}


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _variables() -> dict[bytes, bytes]:
    # (Of os.environ each name and value is decoded, which takes as long as a short test.)
    return {name: os.environb[name] for name in os.environb if name.startswith(b"GPUWATCH_")}


def _hooks() -> dict[str, int]:
    return {
        f"{module}.{table}": len(found)
        for module, tables in _HOOK_TABLES.items()
        if module in sys.modules
        for table in tables
        if (found := getattr(sys.modules[module], table, None))
    }


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    threads, variables = _threads(), _variables()
    yield
    hooks = _hooks()
    for name in hooks:  # so that this test is blamed, and no later one
        module, _, table = name.rpartition(".")
        getattr(sys.modules[module], table).clear()
    assert hooks == {}
    assert _threads() - threads == set()
    assert _variables() == variables


_numbers = itertools.count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this test. pytest's own looks at the folders of all earlier tests, to find a free number."""
    name = re.sub(r"\W", "_", request.node.name)[:27]
    return tmp_path_factory.mktemp(f"{name}{next(_numbers)}", numbered=False)


@pytest.fixture(autouse=True)
def own_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a launch notes down for this user is neither that of whoever runs the tests, nor another test's."""
    folder = tmp_path_factory.getbasetemp() / f"state-{uuid.uuid4().hex}"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    return folder


class StandInNvml:
    """A libnvidia-ml.so.1 of two H100s that says what a file tells it to say (core/gpu/stand_in.c)."""

    gpus = ("GPU-00000000-aaaa-bbbb-cccc-000000000000", "GPU-11111111-aaaa-bbbb-cccc-111111111111")
    migs = ("MIG-00000000-aaaa-bbbb-cccc-000000000000", "MIG-01000000-aaaa-bbbb-cccc-000000000000")
    """On the first GPU, once `0 mig_mode 1` is said."""

    def __init__(self, libraries: dict[str, Path], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._libraries = libraries
        self._file = file
        self._monkeypatch = monkeypatch
        self.use("")

    def use(self, kind: str) -> None:
        """What this process starts from now on meets this one: `OLD` or `ANCIENT` lack functions."""
        self._monkeypatch.setenv("LD_LIBRARY_PATH", str(self._libraries[kind].parent))
        self._monkeypatch.setenv("STAND_IN_NVML", str(self._file))

    def says(self, *lines: str) -> None:
        """All that is not as on a healthy H100, from now on."""
        new = self._file.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        new.replace(self._file)


@pytest.fixture(scope="session")
def stand_in_libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc to build the stand-in for NVML with")
    source = Path(__file__).parent / "core" / "gpu" / "stand_in.c"
    libraries = {}
    for kind in ("", "OLD", "ANCIENT"):
        library = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
        flags = [f"-D{kind}"] * bool(kind)
        subprocess.run([compiler, "-shared", "-fPIC", *flags, "-o", str(library), str(source)], check=True)
        libraries[kind] = library
    return libraries


@pytest.fixture
def nvml(stand_in_libraries: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInNvml:
    """What this process starts meets the stand-in."""
    return StandInNvml(stand_in_libraries, tmp_path / "nvml.txt", monkeypatch)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("cannot mount a small file system here: not root, or in a container without the right to")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
