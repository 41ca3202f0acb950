"""`detect_overflow` beside transformers' own function, and in a run."""

from __future__ import annotations

import math

import pytest
import torch
from gpuwatch import detect_overflow, watch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker import session as session_module
from gpuwatch.worker.session import WorkerSession, current_hooks, make_current

NAN, INF = math.nan, math.inf


@pytest.fixture
def debug_utils():
    from transformers import debug_utils  # by the worker that needs it alone

    return debug_utils


def says(capsys, function, tensor) -> tuple[bool, str]:
    capsys.readouterr()
    found = function(tensor, "after layer_norm")
    return found, capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("values", [[1.0], [], [NAN, 1.0], [INF], [-INF, 2.0], [INF, NAN], [-INF, NAN, INF]], ids=str)
def test_the_lines_are_those_of_transformers(capsys, debug_utils, dtype, values):
    tensor = torch.tensor(values, dtype=dtype, requires_grad=True)
    assert says(capsys, detect_overflow, tensor) == says(capsys, debug_utils.detect_overflow, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1, -5]),
        torch.tensor([True]),
        torch.tensor(complex(1, NAN)),
        torch.tensor([complex(INF, 1), complex(1, NAN)]),
        torch.tensor([NAN, 1.0]).to_sparse(),
        torch.tensor([INF, 1.0]).to(torch.float8_e5m2),
        torch.nested.nested_tensor([torch.ones(2), torch.tensor([INF])], layout=torch.jagged),
    ],
    ids=["int64", "bool", "complex nan", "complex both", "sparse", "float8_e5m2", "jagged"],
)
def test_of_other_dtypes_and_layouts_too(capsys, debug_utils, tensor):
    assert says(capsys, detect_overflow, tensor) == says(capsys, debug_utils.detect_overflow, tensor)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([NAN, 1.0]).to(torch.float8_e4m3fn), (True, "after layer_norm has nans\n")),
        (torch.ones(2, device="meta"), (False, "")),
    ],
    ids=["float8_e4m3fn", "meta"],
)
def test_where_transformers_function_raises(capsys, debug_utils, tensor, expected):
    with pytest.raises((RuntimeError, NotImplementedError)):
        debug_utils.detect_overflow(tensor, "after layer_norm")
    assert says(capsys, detect_overflow, tensor) == expected


def test_what_is_no_tensor_is_refused_in_a_sentence():
    with pytest.raises(TypeError, match="expected a tensor, found list"):
        detect_overflow([1.0], "here")


def test_it_works_in_compiled_code(capsys):
    @torch.compile(backend="eager")
    def halves(x: torch.Tensor) -> torch.Tensor:
        y = x / 0
        detect_overflow(y, "after the division")
        return y / 2

    assert torch.equal(halves(torch.ones(2)), torch.full((2,), INF))
    assert capsys.readouterr().out == "after the division has infs\n"


# -- in a run ---------------------------------------------------------------------------------------------------


class Looks:
    """Stands for the run's hooks: keeps what it is shown."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, str]] = []

    def look_at(self, tensor: torch.Tensor, name: str) -> None:
        self.seen.append((tensor, name))


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setattr(session_module, "_current", None)
    recorder = RecorderWriter(tmp_path / "0.recorder", rank=0, local_rank=0, world_size=1, attempt=0, segments=4)
    made = WorkerSession(WorkerSettings(""), recorder, 0)
    made.hooks = Looks()
    yield made
    recorder.close()


def test_without_a_run_there_are_no_hooks(monkeypatch):
    monkeypatch.setattr(session_module, "_current", None)
    assert current_hooks() is None


def test_in_a_run_the_look_is_handed_on(session):
    make_current(session)
    bad, good = torch.tensor([NAN]), torch.ones(2)
    assert detect_overflow(bad, "the loss")
    assert not detect_overflow(good, "the logits")
    assert session.hooks.seen == [(bad, "the loss"), (good, "the logits")]


def test_a_forked_child_does_not_write_into_the_runs_recorder(session, monkeypatch):
    make_current(session)
    monkeypatch.setattr(session, "_pid", -1)
    assert current_hooks() is None
    assert detect_overflow(torch.tensor([NAN]), "the loss")
    assert session.hooks.seen == []


def test_before_torch_is_imported_there_are_no_hooks(session):
    session.hooks = None
    make_current(session)
    assert detect_overflow(torch.tensor([NAN]), "the loss")


class Scales(torch.nn.Module):
    """Makes an inf between two modules, takes it away again, and looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = self.first(x).abs() / 0
        detect_overflow(scaled, "after scaling")
        return self.second(scaled.clamp(max=1.0))


def test_under_watch_it_is_recorded(capsys):
    model, other = Scales(), Scales()
    with watch(model, on_overflow="continue") as handle:
        assert not detect_overflow(torch.ones(2), "the loss")
        model(torch.ones(2, 4))
        other(torch.ones(2, 4))
        verdict = handle.verdict()
    assert (verdict.kind, verdict.module, verdict.phase) == ("overflow", "after scaling", "forward")
    assert verdict.evidence[0] == "rank 0, batch 0, frame 1: the tensor that detect_overflow was given was not finite"
    assert [page.frames[0].module for page in handle.pages()] == ["the loss", "first", "after scaling"]
    other(torch.ones(2, 4))  # no longer watched
    assert capsys.readouterr().out == "after scaling has infs\n" * 3


def test_outside_of_a_forward_no_module_is_concerned():
    model = torch.nn.Linear(4, 4)
    with watch(model, on_overflow="continue") as handle:
        model(torch.ones(2, 4))
        assert detect_overflow(torch.tensor([NAN]), "the loss")
        verdict = handle.verdict()
    assert verdict.statement.endswith("had nan in `the loss`, which detect_overflow was given in batch 0.")
    assert (verdict.module, verdict.certainty) == ("the loss", "supported")
    assert "weight" not in " ".join([verdict.statement, *verdict.evidence, *verdict.next])


def test_under_watch_it_ends_the_forward_as_an_overflow_in_a_module_does(capsys):
    model = Scales()
    with pytest.raises(OverflowDetected, match="after scaling"), watch(model):
        model(torch.ones(2, 4))
