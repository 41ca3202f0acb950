"""`gpuwatch.TrainerCallback`: `log_to` the reporters of transformers' Trainer."""

from __future__ import annotations

from typing import Any

import transformers

from .log_to import Values, log_to


class TrainerCallback(transformers.TrainerCallback):
    """Logs what `gpuwatch.log_to` logs with `trainer.log`, so to all of `report_to`, every `logging_steps` steps.

    `trainer.add_callback(gpuwatch.TrainerCallback(trainer))`
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log, where the Trainer does."""
        if control.should_log:
            log_to(self._log, state.global_step)
            control.should_log = True  # `trainer.log` clears it: the Trainer's own values come after this

    def _log(self, values: Values, step: int) -> None:
        self._trainer.log(values)
