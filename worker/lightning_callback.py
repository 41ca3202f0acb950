"""`gpuwatch.LightningCallback`: `log_to` the loggers of a Lightning Trainer."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from .log_to import Values, log_to, send_texts, split

# the older package has the same classes, and its Trainer takes no others
_older = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
_lightning: Any = importlib.import_module("pytorch_lightning" if _older else "lightning.pytorch")


class LightningCallback(_lightning.Callback):
    """Logs what `gpuwatch.log_to` logs to the Trainer's own loggers, every `log_every_n_steps` steps.

    `Trainer(callbacks=[gpuwatch.LightningCallback()])`
    """

    def __init__(self) -> None:
        self._loggers: list[Any] = []
        self._last = -1
        """The step that was looked at last."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Log, where Lightning does."""
        before, self._last = self._last, trainer.global_step - 1  # Lightning counts logged steps from 0
        every = trainer.log_every_n_steps
        if self._last != before and every and not trainer.global_step % every:  # not while it accumulates gradients
            self._loggers = trainer.loggers
            log_to(self._log, self._last)

    def _log(self, values: Values, step: int) -> None:
        numbers, texts = split(values)
        for logger in self._loggers:
            logger.log_metrics(numbers, step)
            run = getattr(logger, "run_id", None)  # MLflow's client wants it with each call
            if run is None:
                send_texts(logger.experiment, texts, step)
                continue
            for name, text in texts.items():
                logger.experiment.set_tag(run, name, text)
