"""`gpuwatch.watch(model)`: a handle, in any process, with no launcher."""

from __future__ import annotations

import gc
import html
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import gpuwatch
import pytest
import torch
from gpuwatch.core.errors import OverflowDetected
from gpuwatch.core.recorder import run_folder
from gpuwatch.core.recorder.writer import RecorderWriter
from gpuwatch.core.settings import WorkerSettings
from gpuwatch.worker import session as session_module
from gpuwatch.worker.record.roots import ModuleInfo
from gpuwatch.worker.session import WorkerSession
from torch import nn
from torch.nn.modules import module as torch_module

from .models import Multiplies
from .models import tanh_net as net

pytestmark = pytest.mark.quick_here(20)

X = torch.ones(3, 4)


def hooks() -> int:
    return len(torch_module._global_forward_hooks) + len(torch_module._global_forward_pre_hooks)


@pytest.fixture(autouse=True)
def one_thread():
    """Thousands of small batches: threads that wait for a busy core would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Where the recorders of the test are made."""
    monkeypatch.setattr(run_folder, "_SHARED_MEMORY", tmp_path)
    return lambda: list(tmp_path.iterdir())


# -- the handle ---------------------------------------------------------------------------------------------------


def test_a_watched_training_can_be_read(folders):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gpuwatch.watch(model) as handle:
        for _ in range(3):
            model(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [page.batch for page in handle.pages()] == [0, 1, 2]
    model(X)
    frames = handle.frames()
    assert [frame.phase for frame in frames] == ["forward"] * 4 + ["loss"] + ["backward"] * 7 + ["optimizer"] * 2
    assert [frame.batch for frame in handle.frames(1)] == [1] * 14
    assert handle.frames(7) == []
    assert handle.anomalies == handle.warnings == handle.skips == handle.events == []
    assert handle.report() == handle.verdict().statement
    assert handle.report() == "No overflow: 1 rank, 3 batches, every watched tensor finite."


class Mask(nn.Module):
    def forward(self, x):
        return torch.full((4, 4), -torch.inf).triu(1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = Mask()

    def forward(self, x):
        return torch.softmax(x @ x.T + self.mask(x), -1) @ x


def test_a_mask_is_not_called_finite(folders):
    model = Attention()
    with gpuwatch.watch(model) as handle:
        for _ in range(2):
            model(torch.ones(4, 4))
    statement = "every watched tensor finite, except for -inf alone, as in masks (first: output of `mask` (Mask))."
    assert handle.report() == f"No overflow: 1 rank, 2 batches, {statement}"
    assert [type(event).__name__ for event in handle.events] == ["MaskReturned"]


def test_a_verdict_is_shown_in_one_line(folders):
    model = nn.Sequential(nn.Linear(4, 4), Multiplies(), nn.Identity())
    with gpuwatch.watch(model, on_overflow="continue") as handle:
        model(X)
    verdict = handle.verdict()
    shown = f"<overflow, established: {verdict.statement} [GW104]"
    assert repr(verdict) == str(verdict) and repr(verdict).startswith(shown)
    assert repr(verdict).removeprefix(shown) in ("; see also .evidence, .next>", "; see also .evidence, .next, .cause>")


def test_a_handle_is_shown_in_one_line(folders):
    model = nn.Sequential(nn.Linear(4, 4), Multiplies(1.0), nn.Identity())
    with gpuwatch.watch(model, on_overflow="continue") as handle:
        assert repr(handle) == "<watch of Sequential: no batch yet, no inf or nan seen>"
        model(X * 0)
        assert repr(handle) == "<watch of Sequential: last batch 0, no inf or nan seen>"
        model(X * math.inf)
        model(X)
        other = gpuwatch.watch(model)
        assert repr(other).startswith("<watch of Sequential: no batch yet")
        other.remove()
    bad = len(handle.anomalies)
    words = "1 batch" if bad == 1 else f"{bad} batches"
    assert bad and repr(handle) == f"<watch of Sequential: last batch 2, {words} with inf or nan, removed>"
    with gpuwatch.watch() as everything:
        assert repr(everything) == "<watch of all models: no batch yet, no inf or nan seen>"


def test_a_model_that_ran_without_hooks_is_not_called_clean(folders):
    """Somebody has cleared torch's global hooks."""
    model = net()
    with gpuwatch.watch(model) as handle:
        model(X)
        assert handle.verdict().kind == "clean"
        torch_module._global_forward_pre_hooks.clear()
        model(X * math.nan)
        assert handle.verdict().kind == "unknown"
        model(X)
    assert "cleared torch's global hooks" in handle.report()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"modules": ["no_such"]}, "unknown"),
        ({"modules": ["no_such"], "every": 100}, "unknown"),
        ({"modules": ["0"], "every": 100}, "clean"),
        ({"watch": ["grads"]}, "clean"),
    ],
)
def test_a_pattern_without_a_module_is_not_called_clean(folders, options, kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    handle = gpuwatch.watch(model, **options)
    for _ in range(60):
        model(torch.ones(2, 4)).sum().backward()
    verdict = handle.verdict()
    assert verdict.kind == kind, verdict
    assert ("rank 0 watched no module in its batches" in verdict.statement) == (kind == "unknown")
    handle.remove()


def test_the_report_shows_the_frames_up_to_the_overflow(folders):
    model = nn.Sequential(nn.Linear(4, 4), Multiplies(), nn.Identity())
    with gpuwatch.watch(model, on_overflow="continue") as handle:
        model(X)
        model(X)
    assert [(a.module, a.where.batch) for a in handle.anomalies] == [("1", 0), ("1", 1)]
    lines = handle.report().splitlines()
    verdict = handle.verdict()
    assert lines[0] == verdict.statement
    assert (verdict.kind, verdict.rank, verdict.module, verdict.phase, verdict.batch) == (
        "overflow",
        0,
        "1",
        "forward",
        0,
    )
    assert verdict.certainty == "established"
    assert lines[1] == "abs min  abs max  metadata"
    titles = [line.strip() for line in lines if line.startswith(" " * 17)]
    assert titles == ["0 Linear", "1 Multiplies"]
    assert lines[-1].endswith(" output")
    assert len(handle.report(max_frames=1).splitlines()) < len(lines)


def test_abort_prints_the_report_and_raises_and_the_handle_still_reads(folders, capfd):
    model = nn.Sequential(Multiplies())
    with pytest.raises(OverflowDetected) as raised:
        with gpuwatch.watch(model) as handle:
            model(X)
    assert "combined report" not in str(raised.value)
    assert "--on-overflow" not in str(raised.value)
    assert capfd.readouterr().err.strip() == handle.report()
    assert [a.aborts for a in handle.anomalies] == [True]
    assert "of `0` (Multiplies)" in handle.report()
    assert hooks() == 0


def test_a_notebook_shows_the_reports_page(folders):
    model = nn.Sequential(Multiplies())
    with gpuwatch.watch(model, on_overflow="continue") as handle:
        model(X)
    shown = handle._repr_html_()
    page = html.unescape(re.fullmatch(r'<iframe srcdoc="([^"]*)" [^>]*></iframe>', shown, re.DOTALL)[1])
    assert page.startswith("<!doctype html>")
    assert "run of this process" in page
    assert "same as text" not in page, "no command shows it"


def test_a_notebook_shows_steps_that_trained_nothing(folders):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gpuwatch.watch(model) as handle:
        for batch in range(3):
            (model(X).sum() * (3e20 if batch == 1 else 1.0)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    page = html.unescape(handle._repr_html_())
    assert "every gradient that the optimizer got was zero" in page and "(batch 1)" in page


OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"explain": "off"}, ["frames(N) of the watch", 'on_overflow="continue"', "with explain=0."]),
        ({"explain": 0}, ["SqrtBackward0"]),
        ({"watch": ["forward", "grads"]}, []),
        (
            {"every": 2, "ignore": ["0:weight"]},
            ["(not inspected: every=2)", "every=1 (or explain=N for batch N alone)"],
        ),
    ],
)
def test_advice_names_keywords_and_no_options(folders, settings, words):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Root(), nn.Linear(1, 1))
    handle = gpuwatch.watch(model, **settings)
    model(X if "every" in settings else torch.zeros(3, 4)).sum().backward()
    with pytest.raises(OverflowDetected) as raised:
        model(torch.full((3, 4), math.inf))
        torch.optim.SGD(model.parameters()).step()
    page = re.sub(r"(?s)<(style|script)>.*?</\1>", "", html.unescape(handle._repr_html_()))
    verdict = handle.verdict()
    handle.remove()
    told = [str(raised.value), handle.report(), *verdict.evidence, *verdict.next]
    assert [OPTION.findall(text) for text in (page, *told)] == [[]] * (1 + len(told))
    assert [word for word in words if word not in " ".join(told)] == []


def test_a_bad_input_is_told_as_one(folders):
    with gpuwatch.watch(nn.Sequential(nn.Identity(), nn.Linear(4, 4))) as handle:
        model = handle._hooks
    del model
    net_ = nn.Linear(4, 4)
    with pytest.raises(OverflowDetected, match="which was handed a non-finite input"):
        with gpuwatch.watch(net_) as handle:
            net_(torch.full((3, 4), math.nan))
    assert handle.verdict().phase == "input"


class Root(nn.Module):
    """The length of each row. Of a row of zeros its gradient is 0 * inf."""

    def forward(self, x):
        return x.square().sum(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("asked", ["watching", "removed"])
def test_the_verdict_waits_for_the_numbers_of_a_late_device(folders, late, asked):
    model = nn.Sequential(nn.Linear(4, 4), Multiplies(math.inf))
    handle = gpuwatch.watch(model, on_overflow="continue")
    try:
        with torch.no_grad():
            model(X)
        if asked == "removed":
            handle.remove()
        verdict = handle.verdict()
    finally:
        handle.remove()
    assert (verdict.kind, verdict.module, verdict.batch) == ("overflow", "1", 0)


def test_the_verdict_names_the_maker_of_a_gradient_and_not_the_first_bad_row(folders):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Root(), nn.Linear(1, 1))
    with gpuwatch.watch(model, on_overflow="continue") as handle:
        model(torch.zeros(3, 4)).sum().backward()
    verdict = handle.verdict()
    assert handle.anomalies[0].module == "0", "the first bad row is of the tensor's producer"
    assert (verdict.module, verdict.phase, verdict.certainty) == ("1", "backward", "established")
    assert handle.report().startswith(verdict.statement)


def _spawned(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    run_folder._SHARED_MEMORY = Path(folder)
    model = nn.Sequential(Multiplies(math.inf if rank == 1 else 1.0))
    with gpuwatch.watch(model, on_overflow="continue") as handle:
        model(X)
    verdict = handle.verdict()
    Path(folder, f"said-{rank}").write_text(f"{verdict.kind} {verdict.rank} {verdict.certainty}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_the_rank_is_torch_distributeds(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    context = torch.multiprocessing.get_context("fork")
    processes = [context.Process(target=_spawned, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert (tmp_path / "said-0").read_text() == "clean None supported"
    assert (tmp_path / "said-1").read_text() == "overflow 1 supported", "the other rank was not heard"


def _killed(folder):
    import signal

    run_folder._SHARED_MEMORY = Path(folder)
    handle = gpuwatch.watch(net())
    assert handle is not None
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_has_left_is_removed_by_the_next(folders, tmp_path):
    alive = gpuwatch.watch(net())
    process = torch.multiprocessing.get_context("fork").Process(target=_killed, args=(str(tmp_path),))
    process.start()
    process.join(300)
    assert process.exitcode == -9
    assert len(folders()) == 2
    with gpuwatch.watch(net()):
        assert len(folders()) == 2
    assert alive.events == [], "the recorder of a living one stays"
    alive.remove()


def test_remove_twice_is_once_and_what_was_recorded_stays(folders):
    model = net()
    handle = gpuwatch.watch(model)
    assert hooks() == 2
    model(X)
    handle.remove()
    handle.remove()
    assert hooks() == 0
    assert len(handle.frames()) == 4


@pytest.mark.slow
def test_the_handle_does_not_have_to_be_kept(folders):
    """`gpuwatch.watch(model)` on a line of its own."""
    model = nn.Sequential(Multiplies(1.0))
    handle = gpuwatch.watch(model)
    remove = handle._hooks.detach
    del handle
    gc.collect()
    assert len(folders()) == 1, "the recorder is in use"
    model(X)
    model[0].factor = math.nan
    with pytest.raises(OverflowDetected):
        model(X)
    remove()
    del remove
    gc.collect()
    assert folders() == []


def test_nothing_stays_on_disk_or_in_memory(folders):
    model = net()
    for _ in range(3):
        with gpuwatch.watch(model) as handle:
            model(X).sum().backward()
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
        assert len(folders()) == 1
        del handle
        gc.collect()
        assert folders() == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_leaves_the_recorder_alone(folders):
    model = net()
    handle = gpuwatch.watch(model)
    out = model(X)
    child = os.fork()
    if child == 0:  # what happens here shows in the exit code
        code = 1
        try:
            out.sum().backward()
            model(X)
            left = hooks() + sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
            handle.remove()
            del handle, out
            gc.collect()
            code = 0 if left == 0 and len(folders()) == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    model(X)
    assert [(page.batch, page.complete, len(page.frames)) for page in handle.pages()] == [(0, True, 4), (1, False, 4)]
    verdict = handle.verdict()
    assert f"A child process (pid {child}) of rank 0 called modules and was not watched" in verdict.statement
    assert verdict.certainty == "supported"
    handle.remove()


# -- which model --------------------------------------------------------------------------------------------------


def test_only_the_given_model_is_watched(folders):
    model, other = net(), nn.Sequential(Multiplies())
    optimizer = torch.optim.SGD(other.append(nn.Linear(4, 4)).parameters(), lr=0.1)
    with gpuwatch.watch(model) as handle:
        other(X).sum().backward()
        optimizer.step()
        model(X)
        nn.MSELoss()(other(X), X * math.nan)
    assert {page.root for page in handle.pages()} == {"Sequential"}
    assert [frame.module for frame in handle.frames()] == ["0", "1", "2", ""]
    assert handle.anomalies == []
    assert all(not p._post_accumulate_grad_hooks for p in other.parameters())


def test_the_guard_looks_at_this_models_optimizers_only(folders):
    model, other = net(), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, other)]
    with gpuwatch.watch(model, guard_optimizer=True, on_overflow="continue") as handle:
        for part, optimizer in zip((model, other), optimizers, strict=True):
            part(X).sum().backward()
            next(part.parameters()).grad.fill_(math.nan)
            optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert not other.weight.isfinite().all()
    assert [(a.module, a.role) for a in handle.anomalies] == [("0", "grad weight")]


@pytest.mark.parametrize("outside", [lambda model: model, lambda model: nn.Sequential(nn.Identity(), model, nn.Tanh())])
def test_a_model_inside_of_another_module_is_watched(folders, outside):
    class DistributedDataParallel(nn.Module):
        def __init__(self, module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args):
            return self.module(*args)

    model = net()
    whole = DistributedDataParallel(outside(model))
    with gpuwatch.watch(model) as handle:
        for _ in range(2):
            whole(X).sum().backward()
    assert [frame.module for frame in handle.frames()][:4] == ["0", "1", "2", ""]
    assert [page.batch for page in handle.pages()] == [0, 1]
    assert len([frame for frame in handle.frames() if frame.phase == "backward"]) == 7


def test_without_a_model_every_one_is_watched(folders):
    with gpuwatch.watch(on_overflow="continue") as handle:
        nn.Linear(4, 4)(X)
        Multiplies()(X)
    assert [page.root for page in handle.pages()] == ["Linear", "Multiplies"]
    assert [a.cls for a in handle.anomalies] == ["Multiplies"]


@pytest.mark.parametrize("of", ["a model", "all"])
def test_a_second_watch_replaces_the_first_and_says_so(folders, capfd, of):
    model = nn.Sequential(Multiplies())
    watched = model if of == "a model" else None
    handles = []
    for _ in range(3):  # a cell of a notebook
        handles.append(gpuwatch.watch(watched))
        with pytest.raises(OverflowDetected):
            model(X)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 2 and all("watched already: the new watch replaces the older one" in line for line in told)
    handles[0].remove()
    handles[2].remove()
    assert [len(handle.anomalies) for handle in handles] == [1, 1, 1]
    assert [handle.verdict().kind for handle in handles] == ["overflow"] * 3
    assert hooks() == 0


def test_the_watch_of_a_model_that_is_gone_ends_with_the_next_one(folders, capfd):
    first = gpuwatch.watch(nn.Sequential(Multiplies()))
    gc.collect()
    one = hooks()
    second = gpuwatch.watch(nn.Sequential(Multiplies()))
    assert one == hooks() > 0
    assert capfd.readouterr().err == "", "another model was watched"
    first.remove()
    second.remove()
    assert hooks() == 0


@pytest.mark.filterwarnings("error")
def test_two_watches_of_one_model_in_blocks_both_record_and_raise_once(folders, capfd):
    model = nn.Sequential(Multiplies())
    with gpuwatch.watch(model) as outer, gpuwatch.watch() as every, gpuwatch.watch(model) as inner:
        for _ in range(2):
            try:
                model(X)
            except OverflowDetected:
                with pytest.raises(OverflowDetected):
                    model(X)
    assert [len(handle.anomalies) for handle in (outer, every, inner)] == [4, 4, 4]
    assert capfd.readouterr().err == ""
    assert hooks() == 0


def test_two_handles_watch_their_own_models(folders):
    models = [net(), nn.Sequential(Multiplies())]
    first = gpuwatch.watch(models[0], on_overflow="continue")
    second = gpuwatch.watch(models[1], on_overflow="continue")
    for model in models:
        model(X)
    first.remove()
    for model in models:
        model(X)
    second.remove()
    assert [len(first.anomalies), len(second.anomalies)] == [0, 2]
    assert [len(list(first.pages())), len(list(second.pages()))] == [1, 2]
    assert hooks() == 0


# -- keywords -----------------------------------------------------------------------------------------------------


def test_what_is_no_model_is_refused(folders):
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, or None .*, found list"):
        gpuwatch.watch([net()])
    assert hooks() == 0 and folders() == []


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 1.5}, r"expected every= a number of batches of 1 or more, found every=1\.5"),
        ({"state_every": -1}, "state_every=-1"),
        ({"scaler_skips": 0}, "scaler_skips=0"),
        ({"near_overflow": -1}, "expected near_overflow= powers of two from 0 to 64, found near_overflow=-1"),
        ({"underflow_share": 7}, "underflow_share=7"),
        ({"underflow_share": float("nan")}, "underflow_share=nan"),
        ({"watch": "forward"}, r"expected watch= a list of words, as in watch=\['forward'\], found 'forward'"),
        ({"watch": ["fwd"]}, r"expected watch= some of forward, grads, weights, comms, found \('fwd',\)"),
        ({"on_overflow": "stop"}, "expected on_overflow= abort or continue, found 'stop'"),
        ({"explain": "3"}, "expected explain= auto, off or a batch number, found '3'"),
        ({"modules": "fc*"}, r"expected modules= a list of patterns, as in modules=\['fc\*'\], found 'fc\*'"),
        ({"ignore": "head.*"}, "found 'head"),
        (
            {"sync": True, "on_overflow": "continue"},
            'expected on_overflow="abort" with sync=True, which raises in the failing module, found continue',
        ),
        ({"capture": "f", "on_overflow": "continue"}, 'expected on_overflow="abort" with capture=, which writes when'),
    ],
)
def test_a_keyword_that_makes_no_sense_is_refused(folders, keywords, message):
    with pytest.raises(ValueError, match=message):
        gpuwatch.watch(net(), **keywords)
    assert hooks() == 0
    assert folders() == []


def test_keywords_may_be_iterators(folders):
    model = nn.Sequential(nn.Linear(4, 4), Multiplies())
    with gpuwatch.watch(model, watch=iter(["forward"]), modules=iter(["?"]), ignore=iter(["1:output"])) as handle:
        model(X)
    assert [frame.module for frame in handle.frames()] == ["0", "1"]
    assert handle.frames()[0].weights == []
    assert handle.anomalies == []


def test_warnings_are_read_from_the_handle(folders):
    with gpuwatch.watch(near_overflow=2.0) as handle:
        Multiplies(20000.0)(X.half())
    assert [(w.kind, w.abs_max) for w in handle.warnings] == [("near overflow", 20000.0)]


@pytest.mark.parametrize("device", ["meta"])
def test_the_scripts_default_device_does_not_matter(folders, device):
    with torch.device(device):
        handle = gpuwatch.watch()
    Multiplies(60000.0)(X.half())
    handle.remove()
    assert [w.kind for w in handle.warnings] == ["near overflow"]


# -- inside of a run ----------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A rank that `gpuwatch launch` watches, in this process."""
    recorder = RecorderWriter(tmp_path / "recorder", rank=3, local_rank=0, world_size=4, attempt=0)
    session = WorkerSession(WorkerSettings("", on_overflow="continue"), recorder, 3)
    session.attach_hooks()
    monkeypatch.setattr(session_module, "_current", session)
    yield session
    session.hooks.detach()
    gc.collect()  # readers of the handles
    recorder.close()


def test_inside_of_a_run_there_are_no_second_hooks(run, folders):
    count = hooks()
    model = nn.Sequential(Multiplies())
    with gpuwatch.watch(model, on_overflow="abort") as handle:
        assert hooks() == count
        model(X)
        assert repr(handle) == "<watch of the run's models: last batch 0, 1 batch with inf or nan>"
    assert hooks() == count, "they are the run's"
    model(X)
    assert [(a.where.rank, a.where.batch) for a in handle.anomalies] == [(3, 0), (3, 1)]
    assert len(list(handle.pages())) == 2


# -- detect_overflow ----------------------------------------------------------------------------------------------


def test_detect_overflow_outside_of_a_forward_is_a_batch_of_its_own(watch):
    watched = watch()
    watched.hooks.look_at(X, "loss")
    watched.hooks.look_at(X * math.nan, "loss")
    assert [(page.root, page.batch) for page in watched.pages] == [("detect_overflow", 0), ("detect_overflow", 1)]
    assert [(a.module, a.cls, a.role, a.value, a.where.batch) for a in watched.anomalies] == [
        ("loss", "detect_overflow", "output", "nan", 1)
    ]


def test_detect_overflow_inside_of_a_forward_is_a_frame_of_its_page(watch):
    class Looks(nn.Module):
        def forward(self, x):
            watched.hooks.look_at(x * math.inf, "here")
            return x

    watched = watch(on_overflow="abort")
    with pytest.raises(OverflowDetected, match=r"\+inf in output of `here` \(detect_overflow\)"):
        nn.Sequential(nn.Identity(), Looks())(X)
    assert [(f.module, f.depth, f.parent) for f in watched.last.frames][:2] == [("0", 1, ""), ("here", 2, "1")]
    assert watched.faults == []


# -- the training is left alone -----------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.norm, self.drop, self.head = nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, ids):
        out, _ = self.rnn(self.embed(ids))
        return self.head(self.drop(self.norm(out)))


def train(make, autocast: bool) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = Tagger()
    optimizer = make(model.parameters())
    losses = []
    for _ in range(20):
        ids = torch.randint(0, 16, (4, 6))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten() % 3)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.state_dict().values(), torch.get_rng_state()]


@pytest.mark.quick(4)
@pytest.mark.sample(3)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=0.01)],
    ids=["SGD", "AdamW"],
)
@pytest.mark.parametrize("keywords", [{}, {"guard_optimizer": True, "sync": True}, {"every": 3}], ids=str)
def test_the_same_bits_with_and_without(folders, make, autocast, keywords):
    plain = train(make, autocast)
    with gpuwatch.watch(**keywords) as handle:
        ours = train(make, autocast)
    assert handle.events == []
    assert len(plain) == len(ours)
    assert all(torch.equal(left, right) for left, right in zip(plain, ours, strict=True))


def sizes(handle) -> dict[str, int]:
    """How much the parts of the hooks remember."""
    parts = handle._hooks, *vars(handle._hooks).values(), *handle._hooks._roots.infos
    found = {}
    for part in parts:
        if type(part).__module__.startswith("gpuwatch"):
            names = getattr(part, "__dict__", None) or type(part).__dict__.get("__slots__", ())
            for name in names:
                if isinstance(value := getattr(part, name), (dict, list, set, tuple)):
                    found[f"{id(part)} {type(part).__name__}.{name}"] = len(value)
    return found


@pytest.mark.slow
def test_many_batches_leave_no_more_than_a_few(folders):
    class Odd(nn.Module):
        """Makes modules, with parameters too, and returns things anew each time."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.state = torch.zeros(3, 4)

        def forward(self, x):
            hidden = nn.Softmax(-1)(nn.PReLU()(self.fc(x) + self.state))
            self.state = hidden.detach()
            return {"out": hidden, "state": self.state}

    kept = []

    def batches(count: int) -> None:
        for number in range(count):
            criterion = nn.MSELoss()
            kept.append(bytes(100 + len(kept)))  # so that ids do not come back at once
            loss = criterion(model(X)["out"], X)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)

    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gpuwatch.watch() as handle:
        batches(700)
        before = sizes(handle)
        batches(1300)
        after = sizes(handle)
        infos = sum(type(thing) is ModuleInfo for thing in gc.get_objects())
    assert {name: (before[name], after[name]) for name in before if after[name] > max(2 * before[name], 1100)} == {}
    assert infos < 1500
    assert handle.events == []


# -- what models do on purpose ------------------------------------------------------------------------------------


def test_a_mask_of_the_smallest_number_is_no_warning_and_no_alarm(watch):
    class Masks(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x).masked_fill(x > 0, torch.finfo(x.dtype).min)

    watched = watch(on_overflow="abort")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        Masks()(X.to(dtype))
    assert watched.events == []


def test_with_sync_the_failing_module_raises(watch):
    seen = []

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.after = Multiplies(), nn.Identity()

        def forward(self, x):
            x = self.bad(x)
            seen.append("went on")
            return self.after(x)

    watched = watch(on_overflow="abort", sync=True)
    model = Outer()
    with pytest.raises(OverflowDetected, match="output of `bad`") as raised:
        model(X)
    assert seen == []
    assert watched.hooks.raised_in(raised.value) == "bad"
    model.bad.factor = 1.0
    model(X)
    assert [frame.module for frame in watched.last.frames] == ["bad", "after", ""]


def test_another_thread_does_not_disturb_a_forward(watch):
    import threading

    other = nn.Linear(4, 4)

    class Waits(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=other, args=(X,))
            thread.start()
            thread.join()
            return x

    watched = watch()
    model = nn.Sequential(nn.Identity(), Waits(), nn.Identity())
    model(X)
    assert [frame.module for frame in watched.last.frames] == ["0", "1", "2", ""]
    other(X)
    assert watched.last.root == "Linear"
    assert watched.faults == []


ENDS_LATE = """
import gpuwatch, torch
from datetime import timedelta
from torch.distributed import HashStore

def wait_in_torch(seconds, HashStore=HashStore, timedelta=timedelta):
    HashStore().wait(["never set"], timedelta(seconds=seconds))

class Waits(torch.nn.Module):
    def forward(self, x, calls=[]):
        calls.append(1)
        if len(calls) > 1:
            wait_in_torch(2)
        return x / 0

class EndsWithPython:
    def __del__(self, wait=wait_in_torch):
        try:
            wait(3)
        except RuntimeError:
            pass

end = EndsWithPython()
watched = gpuwatch.watch(model := torch.nn.Sequential(Waits()))
watched._hooks.second_runs.rerun.limit_s = 0.1
try:
    model(torch.ones(2))
except gpuwatch.OverflowDetected:
    print(*[event.unknown for event in watched.events if hasattr(event, "unknown")])
"""


@pytest.mark.slow
def test_a_process_ends_as_ever_while_a_second_run_is_inside_of_torch():
    """A daemon thread that came out of torch's C++ while Python ended would abort the process."""
    done = subprocess.run([sys.executable, "-c", ENDS_LATE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "a second run of the forward took longer than 0.1 s\n"


LOOKS_AT_IT = """
import random, torch, gpuwatch
watched = gpuwatch.watch(model := torch.nn.Sequential(torch.nn.ReLU()))
model(torch.ones(2))
before = random.getstate()
LOOK
print(random.getstate() == before)
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("look", ["watched.verdict()", "watched._repr_html_()", "watched.report()"])
def test_what_a_script_draws_is_the_same_where_it_looks_at_its_watch(look):
    """rich draws one of Python's random numbers at its import."""
    done = subprocess.run(
        [sys.executable, "-c", LOOKS_AT_IT.replace("LOOK", look)], capture_output=True, text=True, timeout=600
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
