"""PyTorch Lightning: ``Trainer(callbacks=[IngeroCallback(run_id="r7")])``.

Hooks: lightning.pytorch.callbacks.Callback (Lightning 2.x).
"""

from __future__ import annotations

from typing import Any

from ingero_annotate import Annotator

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:  # the older name of the package
    from pytorch_lightning.callbacks import Callback


class IngeroCallback(Callback):  # type: ignore[misc]
    """Says step, epoch and phase."""

    def __init__(self, annotator: Annotator | None = None, **labels: object) -> None:
        self.annotator = annotator or Annotator(**labels)

    def on_train_batch_start(self, trainer: Any, _module: Any, _batch: Any, _index: int) -> None:
        self.annotator.say(step=trainer.global_step, epoch=trainer.current_epoch, phase="train")

    def on_validation_start(self, trainer: Any, _module: Any) -> None:
        self.annotator.say(step=trainer.global_step, phase="validation")

    def on_save_checkpoint(self, trainer: Any, _module: Any, _checkpoint: dict[str, Any]) -> None:
        self.annotator.say(step=trainer.global_step, phase="checkpoint")

    def on_train_end(self, _trainer: Any, _module: Any) -> None:
        self.annotator.say(phase="end")
        self.annotator.close()
