"""Hugging Face Transformers: ``Trainer(…, callbacks=[IngeroCallback(run_id="r7")])``.

Hooks: transformers.TrainerCallback (Transformers 4.x and 5.x).
"""

from __future__ import annotations

from typing import Any

from ingero_annotate import Annotator
from transformers import TrainerCallback


class IngeroCallback(TrainerCallback):  # type: ignore[misc]
    """Says step, epoch and phase."""

    def __init__(self, annotator: Annotator | None = None, **labels: object) -> None:
        self.annotator = annotator or Annotator(**labels)

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.annotator.say(step=state.global_step, epoch=int(state.epoch or 0), phase="train")

    def on_evaluate(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Called after an evaluation: the next step says ``train`` again."""
        self.annotator.say(step=state.global_step, phase="evaluated")

    def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.annotator.say(step=state.global_step, phase="saved")

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        self.annotator.say(phase="end")
        self.annotator.close()
