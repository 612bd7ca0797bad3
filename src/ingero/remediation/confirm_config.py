"""The policy's section ``confirm``: what else must agree before a node is acted on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ingero.config.model import StrictModel
from ingero.config.types import Duration
from ingero.units import parse_duration


class PairTestConfig(StrictModel):
    """A short job on the suspect and a healthy node that is alike. Only with ``action.slurm``."""

    command: tuple[str, ...] = Field(
        default=(),
        description="Program and arguments that run on the first of the two nodes in a batch job, and print the rounds"
        " of each; empty takes the one that comes along, which needs python3 and srun there.",
    )
    options: tuple[str, ...] = Field(
        default=(),
        description="Further options of sbatch, such as --account=ops, --exclusive or --gpus-per-node=8.",
    )
    partition: str = Field("", description="Of the job; empty takes one that has the suspect.")
    rounds: int = Field(
        7, ge=4, le=50, description="Of each node; the command gets it as $INGERO_PAIR_ROUNDS."
    )
    min_ratio: float = Field(
        1.1, gt=1, description="Times the healthy node: 1.1 takes a tenth longer."
    )
    max_wait: Duration = Field(
        parse_duration("2m"), gt=0, description="For free processors; then it is cancelled."
    )
    time_limit: Duration = Field(
        parse_duration("1m"), gt=0, description="Of the running job. Slurm counts whole minutes."
    )
    tries: int = Field(3, ge=1, description="Tests of one episode that could not tell.")
    retry_after: Duration = Field(
        parse_duration("5m"), description="Between a test that could not tell and the next."
    )
    valid_for: Duration = Field(
        parse_duration("1h"), gt=0, description="A test that confirms or contradicts; then again."
    )
    cannot_tell: Literal["stop", "let"] = Field(
        "stop",
        description="When the last of the tries could not tell either: stop leaves the node alone, let acts on it.",
    )


class ConfirmConfig(StrictModel):
    """What else must agree."""

    pair_test: PairTestConfig | None = Field(
        None, description="Ask the scheduler to compare the suspect with a healthy node."
    )
