"""`gpuwatch.watch(model)`: the hooks without the launcher, for a script or a notebook."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterable
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..core.recorder.run_folder import make_scratch, remove_scratch
from ..core.recorder.writer import RecorderWriter
from ..core.settings import (
    Every,
    Explain,
    OnOverflow,
    Watched,
    WorkerSettings,
    as_keywords,
    worker_options,
    wrong_together,
)
from ..core.text import shown_name
from .model_watch import ModelWatch
from .session import current_hooks
from .watched_models import forked, replace_older, watching

if TYPE_CHECKING:
    from torch import nn


def watch(
    model: nn.Module | None = None,
    *,
    watch: Iterable[Watched] = ("forward", "grads", "weights", "comms"),
    modules: Iterable[str] = (),
    every: Every = 1,
    on_overflow: OnOverflow = "abort",
    sync: bool = False,
    guard_optimizer: bool = False,
    ignore: Iterable[str] = (),
    near_overflow: float = 1.0,
    underflow_share: float = 0.1,
    scaler_skips: int = 12,
    state_every: int = 50,
    explain: Explain = "auto",
    capture: str | os.PathLike[str] = "",
    capture_max: int = 2 << 30,
) -> ModelWatch:
    """Watch a model, or, with None, every model of this process. Returns a handle, which is also a context manager.

    The keywords are the options of `gpuwatch launch`. With `on_overflow="abort"`, OverflowDetected is raised at the end
    of the forward, or before the optimizer step, in which something became inf or nan. With "continue" the overflow is
    only listed in `anomalies`. With `capture`, a folder, a forward that overflows is written there, with its weights
    and its data, in at most `capture_max` bytes: `gpuwatch replay FOLDER` runs it again. In a rank that `gpuwatch
    launch` watches, the run's settings apply and the keywords have no effect. A second watch of the same model replaces
    the first one, unless that is in a `with`. Raises ValueError for an invalid keyword, TypeError for a model that is
    none.
    """
    from .module_hooks import ModuleHooks
    from .record.names import class_of

    running = current_hooks()
    if model is not None and not hasattr(model, "named_modules"):
        raise TypeError(f"expected a torch.nn.Module, or None for all models, found {type(model).__name__}")
    if running is not None:
        return ModelWatch(running, running.progress.recorder, "the run's models", owned=False)
    if every != "auto":
        _check_numbers(every=every)
    _check_numbers(
        near_overflow=near_overflow,
        underflow_share=underflow_share,
        scaler_skips=scaler_skips,
        state_every=state_every,
    )
    for name, of, words in (
        ("watch", "words", watch),
        ("modules", "patterns", modules),
        ("ignore", "patterns", ignore),
    ):
        if isinstance(words, str):  # its letters would be patterns, and the * of "head.*" matches every module
            raise ValueError(f"expected {name}= a list of {of}, as in {name}=[{words!r}], found {words!r}")
    parts = tuple(watch)
    for expected, given, is_right in (
        ("watch= some of forward, grads, weights, comms", parts, set(parts) <= set(get_args(Watched))),
        ("on_overflow= abort or continue", on_overflow, on_overflow in get_args(OnOverflow)),
        ("explain= auto, off or a batch number", explain, _is_explain(explain)),
    ):
        if not is_right:
            raise ValueError(f"expected {expected}, found {given!r}")
    settings = WorkerSettings(
        recorder_dir="",
        on_overflow=on_overflow,
        watch=parts,
        modules=list(modules),
        every=every,
        sync=sync,
        guard_optimizer=guard_optimizer,
        ignore=list(ignore),
        near_overflow=near_overflow,
        underflow_share=underflow_share,
        scaler_skips=scaler_skips,
        state_every=state_every,
        explain=explain,
        capture=str(Path(capture).absolute()) if capture else "",
        capture_max=capture_max,
    )
    wrong = wrong_together(settings)
    if wrong:
        raise ValueError(as_keywords(wrong))
    replace_older(model)
    folder = make_scratch(1)
    remove = partial(_remove_in, os.getpid(), folder)
    rank = rank_here()
    if rank is None:
        rank = int(os.environ.get("RANK", "0"))
    try:
        recorder = RecorderWriter(folder / "recorder", rank=rank, local_rank=0, world_size=1, attempt=0)
        hooks = ModuleHooks(recorder, settings, rank, only=model)
    except BaseException:
        remove()
        raise
    # bound to the hooks, which the modules hold: the script need not keep the handle
    weakref.finalize(hooks, remove)
    hooks.attach()
    watching[hooks] = os.getpid(), weakref.ref(model) if model is not None else None
    os.register_at_fork(after_in_child=partial(forked, weakref.ref(hooks)))
    of = shown_name(class_of(model)) if model is not None else "all models"
    return ModelWatch(hooks, recorder, of, owned=True)


def rank_here() -> int | None:
    """This process's rank in torch.distributed; None outside of a process group."""
    import torch  # not when the name `watch` is imported

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return None


def _check_numbers(**given: Any) -> None:
    """Raise ValueError if one is not in the range that its option of the command line has."""
    for name, value in given.items():
        kind, option = worker_options()[name]
        most = option.most or math.inf
        if not isinstance(value, Real if kind is float else Integral) or not option.least <= float(value) <= most:
            reach = f"from {option.least} to {most:g}" if option.most else f"of {option.least} or more"
            raise ValueError(f"expected {name}= {option.of} {reach}, found {name}={value!r}")


def _is_explain(explain: object) -> bool:
    return explain in ("auto", "off") or (type(explain) is int and explain >= 0)


def _remove_in(pid: int, folder: Path) -> None:
    """Remove the folder of a process, if this is that process: a fork has the same exit handlers."""
    if os.getpid() == pid:
        remove_scratch(folder)
