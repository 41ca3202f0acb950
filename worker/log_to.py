"""`gpuwatch.log_to(wandb)`: what this rank's recorder says now, in the tracker that the script logs to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy

from ..core.codes import Code, coded
from ..core.errors import OverflowDetected
from ..core.events.alarms import Anomaly
from ..core.events.own_limits import OwnFault
from ..core.frames import RowMark, module_text
from ..core.guest.tell import say
from ..core.recorder.layout import WAITING, HeadField
from ..core.recorder.page_tables import PageTables
from ..core.recorder.pages import NameTable
from ..core.recorder.reader import RecorderReader
from ..core.signal_errors import from_outside
from ..core.values import DTYPE_NAMES, headroom
from ..core.wire.columns import OutputSlots
from .module_hooks import ModuleHooks
from .record.raised_overflow import clause_of
from .watched_models import watching_hooks

Values = dict[str, float | str]
_OVERFLOW = "gpuwatch/overflow"
_MOST_TARGETS = 8
_MOST_PAGES = 8
"""How far back to look for a batch whose numbers have arrived from the device."""

_live: weakref.ref[LiveNumbers] | None = None
"""The hooks keep it alive."""
_is_warned = _is_broken = False


def log_to(target: Any, step: int | None = None) -> None:
    """Log what gpuwatch sees of this rank to the tracker `target`, beside what the script logs there itself.

    `target` is `wandb` or a run of it, `mlflow`, a `SummaryWriter`, or a function, which is called with a dict of
    numbers and texts, and the step. With None, or a tracker that has no run, nothing is logged. Call it where the
    script logs, with the same step. Without one, W&B adds the values to the script's next `wandb.log`, and the others
    get the count of optimizer steps.

        gpuwatch/headroom         powers of two between the largest output of a module and its dtype's limit
        gpuwatch/closest_module   the module with that output
        gpuwatch/step_seconds     mean of the steps since the last call, at most 64
        gpuwatch/waiting_share    share of that time in which this rank waited for others
        gpuwatch/nonfinite        batches of this rank with nan or inf, at most 64
        gpuwatch/near_overflow    values near overflow or in underflow
        gpuwatch/skipped_steps    optimizer steps that a GradScaler has skipped
        gpuwatch/overflow         the first nan or inf of this rank; logged before the exception that ends the job, too

    A value that is not known is left out, and a text is logged when it changes. The call waits for no device. An error
    of the tracker is recorded as a fault of gpuwatch, and the script goes on. Where gpuwatch does not watch this
    process, the call does nothing, and the first one says so. Raises TypeError for another target.
    """
    global _live, _is_warned, _is_broken
    if target is None or _is_broken:
        return
    send = _sender(target)
    hooks = watching_hooks()
    if hooks is None:
        if not _is_warned:
            _is_warned = True
            what = "expected `gpuwatch launch`, `gpuwatch run` or gpuwatch.watch(model)"
            say(coded(f"log_to logs nothing: {what}", Code.NESTED_RUN))
        return
    try:
        live = _live() if _live is not None else None
        if live is None or live.hooks is not hooks:
            live = LiveNumbers(hooks)
            _live = weakref.ref(live)
        live.log(target, send, step)
    except OverflowDetected:
        raise
    except Exception as error:  # our own
        if from_outside(error):
            raise
        _is_broken = True
        _record(hooks, error)


class LiveNumbers:
    """The newest numbers of a rank, and the targets that get them. Raises OSError if the recorder cannot be read."""

    def __init__(self, hooks: ModuleHooks) -> None:
        self.hooks = hooks
        self._reader = RecorderReader(hooks.progress.recorder.path)
        self._names = NameTable()
        self._outputs = OutputSlots()
        self._anomalies: list[Anomaly] = []
        self._overflow = ""
        self._targets: list[LogTarget] = []
        hooks.judging.before_raise = self._overflowed

    def log(self, target: Any, send: Sender, step: int | None) -> None:
        """Send them to `target`."""
        known = next((each for each in self._targets if each.target == target), None) or LogTarget(target, send)
        self._targets = [*(each for each in self._targets if each is not known), known][-_MOST_TARGETS:]
        known.step = step
        self._send(known)

    def _overflowed(self, found: str) -> None:
        self._overflow = found
        for target in self._targets:
            self._send(target)

    def _send(self, to: LogTarget) -> None:
        values = self._newest(to)
        changed = {name: value for name, value in values.items() if to.texts.get(name) != value}
        to.texts.update((name, value) for name, value in changed.items() if isinstance(value, str))
        try:
            to.send(changed, to.step, self.hooks.progress.step)
        except OverflowDetected:
            raise
        except Exception as error:
            if from_outside(error):
                raise
            if not to.has_failed:
                to.has_failed = True
                _record(self.hooks, error)

    def _newest(self, to: LogTarget) -> Values:
        definitions, events = self._reader.new_entries()
        self._names.add(definitions)
        self._outputs.define(definitions)
        self._anomalies += [event for event in events if isinstance(event, Anomaly)]
        values: Values = {}
        closest = self._closest()
        if closest is not None:
            values["gpuwatch/headroom"], values["gpuwatch/closest_module"] = closest
        if steps := self._reader.steps(to.steps_seen):
            to.steps_seen = steps[-1][0]
            total = sum(sum(step.parts) for _, step in steps)
            values["gpuwatch/step_seconds"] = total / 1e9 / len(steps)
            values["gpuwatch/waiting_share"] = sum(step.parts[WAITING] for _, step in steps) / max(1, total)
        values["gpuwatch/nonfinite"] = len(self._anomalies)
        values["gpuwatch/near_overflow"] = self._reader[HeadField.WARNED]
        values["gpuwatch/skipped_steps"] = self._reader[HeadField.SCALER_SKIPS]
        if self._anomalies:
            self._overflow = self._overflow or clause_of(self._anomalies[0])
            values[_OVERFLOW] = self._overflow
        return values

    def _closest(self) -> tuple[float, str] | None:
        """(powers of two up to the limit, module) of the output closest to it, in the newest inspected batch."""
        for held in islice(reversed(self._reader.held()), _MOST_PAGES):
            message = self._reader.page(held.number)
            if message is None:
                continue
            tables = PageTables(message)
            reading = self._outputs.read(tables)
            if reading.pending or (tables.rows["mark"] & RowMark.SKIPPED).any():
                continue
            numbers = (reading.codes.astype(numpy.uint32) << 16).view(numpy.float32).tolist()
            columns = zip(numbers, map(DTYPE_NAMES.__getitem__, reading.dtypes.tolist()), reading.columns, strict=True)
            known = [(left, *rest) for number, *rest in columns if (left := headroom(number, rest[0])) is not None]
            if known:
                left, dtype, column = min(known)
                module = self._names.modules.get(self._names.slots[self._outputs.slots[column]].module)
                return left, f"{module_text(module.name, module.cls)}, {dtype}" if module is not None else "unknown"
        return None


Sender = Callable[[Values, int | None, int], None]
"""Called with the values, the step of the script if it has one, and the count of optimizer steps."""


class LogTarget:
    """A tracker, and what it has been sent."""

    def __init__(self, target: Any, send: Sender) -> None:
        self.target = target
        self.send = send
        self.step: int | None = None
        self.steps_seen = 0
        """Timed steps so far."""
        self.texts: Values = {}
        self.has_failed = False


def split(values: Values) -> tuple[dict[str, float], dict[str, str]]:
    """(numbers, texts)"""
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    return numbers, {name: value for name, value in values.items() if isinstance(value, str)}


def send_texts(tracker: Any, texts: dict[str, str], step: int) -> None:
    """To W&B, MLflow or a SummaryWriter; another tracker gets none."""
    if hasattr(tracker, "add_text"):
        for name, text in texts.items():
            tracker.add_text(name, text, step)
        if _OVERFLOW in texts:
            tracker.flush()  # a thread of its own writes the file, and the job may end now
    elif hasattr(tracker, "set_tags"):
        tracker.set_tags(texts)
    elif hasattr(tracker, "summary"):
        tracker.summary.update(texts)


def _sender(target: Any) -> Sender:
    def send(values: Values, step: int | None, steps: int) -> None:
        numbers, texts = split(values)
        at = steps if step is None else step
        if (is_wandb and getattr(target, "run", target) is None) or (is_mlflow and target.active_run() is None):
            return  # as on ranks that log nothing: MLflow would begin a run
        if is_wandb:
            target.log(numbers, step=step, commit=False)  # its own step counts the script's calls
        elif is_mlflow:
            target.log_metrics(numbers, step=at)
        else:
            for name, number in numbers.items():
                target.add_scalar(name, number, at)
        send_texts(target, texts, at)

    is_wandb = hasattr(target, "log") and hasattr(target, "summary")
    is_mlflow = hasattr(target, "log_metrics") and hasattr(target, "active_run")
    if is_wandb or is_mlflow or hasattr(target, "add_scalar"):
        return send
    if callable(target):
        return lambda values, step, steps: target(values, steps if step is None else step)
    raise TypeError(
        "log_to: expected wandb or a run of it, mlflow, a SummaryWriter, or a function of values and step, "
        f"found {type(target).__name__}"
    )


def _record(hooks: ModuleHooks, error: Exception) -> None:
    hooks.progress.recorder.append(OwnFault(hooks.where(), "log_to", f"{type(error).__name__}: {error}"))
