"""Ray Train: the callback of `ray.train` runs in the controller, so the worker's own loop speaks.

    def train_func(config):
        say = build_annotator()
        for epoch in range(config["epochs"]):
            for step, batch in enumerate(loader):
                say.say(step=step, epoch=epoch, phase="train")
                ...

    TorchTrainer(train_func, ...).fit()

Source: Ray 2.x, ray.train.get_context(): experiment and trial names, world rank.
"""

from __future__ import annotations

from ingero_annotate import Annotator
from ray import train


def build_annotator() -> Annotator:
    """An annotator that says which run and which worker this is; call it inside ``train_func``."""
    context = train.get_context()
    return Annotator(run_id=context.get_experiment_name(), task_id=context.get_world_rank())
