"""Hooks in this process, with a real recorder that a real reader reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gpuwatch.collector.decide.decide import decide
from gpuwatch.collector.facts.fold import fold
from gpuwatch.collector.facts.run_facts import RunFacts
from gpuwatch.collector.report.verdict import Verdict
from gpuwatch.core.events.alarms import Anomaly
from gpuwatch.core.events.log_entries import WorkerEvent
from gpuwatch.core.events.own_limits import OwnFault
from gpuwatch.core.frames import Frame, Page, Row
from gpuwatch.core.recorder.layout import file_name
from gpuwatch.core.recorder.pages import NameTable, decode_page
from gpuwatch.core.recorder.reader import RecorderReader
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.core.wire.messages import AgentBody, AgentHello, NodeBye
from gpuwatch.launcher.agent.rank_watch import RankWatch
from gpuwatch.worker.session import WorkerSession

from ..waiting import until

if TYPE_CHECKING:
    from gpuwatch.tests.fakes.late_device import LateDevice


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """torch draws a seed for each process: with some of them an output times inf is -inf throughout, as a mask is."""
    import torch

    torch.manual_seed(0)


def use_late_device(patch: pytest.MonkeyPatch, driver: LateDevice | None) -> None:
    """Have a driver hold every tensor of this process; None: they are in host memory."""
    for name in ("hooks.native_writer", "record.rows", "device.device"):
        patch.setattr(f"gpuwatch.worker.{name}.late_device", lambda: driver)


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    """A process group of this process alone."""
    from torch import distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Watched:
    """Attached hooks and a reader of what they record."""

    def __init__(self, path: Path, *, log_bytes: int = 1 << 20, **settings: Any) -> None:
        from gpuwatch.worker.module_hooks import ModuleHooks

        self.recorder = RecorderWriter(
            path, rank=0, local_rank=0, world_size=1, attempt=0, log_bytes=log_bytes, segments=64
        )
        self.reader = RecorderReader(path)
        self.hooks = ModuleHooks(self.recorder, WorkerSettings("", **{"on_overflow": "continue", **settings}), 0)
        self.hooks.attach()
        self._names = NameTable()
        self._events: list[WorkerEvent] = []

    def _read(self) -> None:
        if not self.recorder.memory.closed:
            self.hooks.judging.finish()  # of a late device: see GPUWATCH_LATE_DEVICE
        definitions, events = self.reader.new_entries()
        self._names.add(definitions)
        self._events += events

    @property
    def events(self) -> list[WorkerEvent]:
        self._read()
        return self._events

    def of(self, kind: type[Any]) -> list[Any]:
        """The events of one class."""
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def anomalies(self) -> list[Anomaly]:
        return self.of(Anomaly)

    @property
    def faults(self) -> list[OwnFault]:
        return self.of(OwnFault)

    @property
    def pages(self) -> list[Page]:
        self._read()
        found = [self.reader.page(held.number) for held in self.reader.held()]
        return [decode_page(page, self._names) for page in found if page is not None]

    @property
    def last(self) -> Page:
        return self.pages[-1]

    def frames(self, *phases: str, page: int = -1) -> list[Frame]:
        """The frames of some phases in one page."""
        return [frame for frame in self.pages[page].frames if frame.phase in phases]

    def rows(self, *phases: str, page: int = -1) -> list[tuple[str, str]]:
        """(module, role) of every row of some phases in one page."""
        return [(frame.module, row.role) for frame in self.frames(*phases, page=page) for row in frame.rows]

    def row(self, module: str, role: str, *, page: int = -1) -> Row:
        """The one row of that name in a page."""
        frames = [frame for frame in self.pages[page].frames if frame.module == module]
        (row,) = [row for frame in frames for row in frame.rows if row.role == role]
        return row

    def facts(self, before: Sequence[AgentBody] = ()) -> RunFacts:
        """The facts of a run of this rank alone, if its script ends now and well."""
        session = WorkerSession(self.hooks.progress.settings, self.recorder, 0)
        session.hooks = self.hooks
        session.finished(0)
        folder = self.recorder.path.with_suffix(".node")
        folder.mkdir()
        (folder / file_name(0, 0)).hardlink_to(self.recorder.path)
        agent = RankWatch(folder, 0, 0, os.getpid(), [])
        hello = AgentHello("a", "host", 1, 1, 1, ["train.py"], {}, "run")
        bodies = [hello, *before, *agent.end(0, "itself", 0.0), NodeBye("ok")]
        agent.close()
        return fold([("a", number, body) for number, body in enumerate(bodies)])

    def verdict(self, before: Sequence[AgentBody] = ()) -> Verdict:
        """The verdict on that run."""
        return decide(self.facts(before))

    def settle(self) -> None:
        """The script has ended. A late device's time goes on with each look."""
        until(self.hooks.settle, "all numbers have arrived", self.reader.state, look_s=0)

    def collect(self) -> None:
        """Between two batches."""
        until(self.hooks.collect, "all numbers that are on their way have arrived", self.reader.state, look_s=0)

    def close(self) -> None:
        self.hooks.close()
        self.reader.close()
        self.recorder.close()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(**settings: Any) -> Watched:
        made.append(Watched(tmp_path / f"{len(made)}.recorder", **settings))
        return made[-1]

    yield make
    for watched in made:
        watched.close()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """The device on which all tensors of the test are."""
    from gpuwatch.tests.fakes.late_device import LateDevice

    driver = LateDevice(3, longest=6)
    use_late_device(monkeypatch, driver)
    return driver


@pytest.fixture(params=["native", "python", "late"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the numbers are read: at once by the native writer, at once by Python, or late, as those of a GPU."""
    if request.param == "late":
        request.getfixturevalue("late")
    elif request.param == "python":
        monkeypatch.setattr("gpuwatch.worker.hooks.native_writer.NativeFrameWriter", None)
    return str(request.param)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every tensor that is measured, kept alive so that none is taken for another. The compiled way shows none."""
    from gpuwatch.worker.hooks import native_writer
    from gpuwatch.worker.record import rows, skipped_rows

    seen: list[Any] = []

    def noted(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensor, *rest: (seen.append(tensor), real(tensor, *rest))[1]

    monkeypatch.setattr(native_writer, "NativeFrameWriter", None)
    for place in (rows, skipped_rows):
        monkeypatch.setattr(place, "measure", noted(place.measure))
    monkeypatch.setattr(rows, "stats_in_memory", noted(rows.stats_in_memory))
    return seen
