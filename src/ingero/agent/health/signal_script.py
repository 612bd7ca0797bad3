"""``--script FILE``: a timeline of signals, so that a test or a demonstration drives an agent step by step.

The format is documented in ``docs/guides/agent.md``. Time starts with the first sample; each step lasts ``for`` and its
values replace the defaults only while it lasts.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from ingero.agent.health.signals.reading import Reading, Signals
from ingero.config import Duration, StrictModel, check_model
from ingero.config.document import Document, load_document
from ingero.errors import ConfigError, ConfigProblem

LAUNCHES: Final = 10
"""Launches in the window of a step that has throughput and sets nothing else."""


class SignalValues(StrictModel):
    """What the node reads; null is a signal that cannot be read."""

    throughput: float | None = Field(100.0, ge=0, description="Kernel launches per second.")
    compute: float | None = Field(0.9, description="Share of time inside CUDA calls, 0 to 1.")
    memory: float | None = Field(0.9, description="Free share of GPU memory, 0 to 1.")
    cpu: float | None = Field(0.9, description="Idle share of the processors, 0 to 1.")
    launches: int | None = Field(
        None,
        ge=0,
        description="Launches in the window; when left out, 10, or 0 without throughput.",
    )
    pending: bool | None = Field(None, description="Work is outstanding although nothing launches.")
    workload: str = Field("", description="Identity of the job; a change of it calibrates again.")
    noise: float = Field(0.0, ge=0, le=1, description="Relative standard deviation of each value.")


class StepConfig(SignalValues):
    """A stretch of the timeline; what it does not set comes from ``defaults``."""

    duration: Duration = Field(alias="for", gt=0, description="How long it lasts.")
    read: Literal["ok", "fail"] = Field("ok", description="`fail`: the node cannot be read.")
    stall: bool = Field(
        default=False, description="A hang: nothing is launched while a call is outstanding."
    )


class ScriptConfig(StrictModel):
    """A whole timeline."""

    seed: int = Field(0, description="Seed of the noise.")
    then: Literal["hold", "repeat", "stop"] = Field("hold", description="After the last step.")
    defaults: SignalValues = Field(SignalValues(), description="Values that a step does not set.")
    steps: tuple[StepConfig, ...] = Field(min_length=1, description="The timeline.")


class ScriptSource:
    """Plays a timeline; its clock starts with the first sample."""

    def __init__(self, script: ScriptConfig) -> None:
        self._then = script.then
        self._random = random.Random(script.seed)  # noqa: S311 - noise, not secrets
        self._steps = tuple((step, _over(script.defaults, step)) for step in script.steps)
        self._total_ns = sum(step.duration for step in script.steps)
        self._start_ns: int | None = None
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """True when a sample was taken after the end of a timeline that stops."""
        return self._is_over

    def read(self, wall_ns: int, mono_ns: int) -> Reading | None:
        """The values for now; None where the timeline makes the read fail."""
        if self._start_ns is None:
            self._start_ns = mono_ns
        elapsed_ns = mono_ns - self._start_ns
        if elapsed_ns >= self._total_ns:
            self._is_over = self._then == "stop"
            elapsed_ns = (
                elapsed_ns % self._total_ns if self._then == "repeat" else self._total_ns - 1
            )
        step, values = self._find(elapsed_ns)
        if step.read == "fail":
            return None
        if step.stall:
            values = values.model_copy(update={"throughput": 0.0, "launches": 0, "pending": True})
        return self._build(values, wall_ns)

    def _find(self, elapsed_ns: int) -> tuple[StepConfig, SignalValues]:
        for step, values in self._steps:
            if elapsed_ns < step.duration:
                return step, values
            elapsed_ns -= step.duration
        return self._steps[-1]

    def _build(self, values: SignalValues, wall_ns: int) -> Reading:
        signals = (values.throughput, values.compute, values.memory, values.cpu)
        launches = values.launches
        if launches is None:
            launches = 0 if values.throughput == 0 else LAUNCHES
        return Reading(
            signals=Signals(*(self._shake(value, values.noise) for value in signals)),
            launches=launches,
            is_pending=values.pending,
            workload=values.workload,
            wall_ns=wall_ns,
        )

    def _shake(self, value: float | None, noise: float) -> float | None:
        if value is None or not noise:
            return value
        return max(value * (1 + self._random.gauss(0, noise)), 0.0)


def load_script(path: Path) -> ScriptConfig:
    """Read a script: a YAML mapping, or one JSON step per line when the name ends in ``.jsonl``.

    Raises:
        ConfigError: The file cannot be read or has mistakes; lists every problem.
    """
    document = _load_lines(path) if path.suffix == ".jsonl" else load_document(path)
    script, problems = check_model(ScriptConfig, document.tree, lines=document.lines)
    document.problems += problems
    document.raise_problems()
    assert script is not None
    return script


def _load_lines(path: Path) -> Document:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    steps: list[object] = []
    document = Document({"steps": steps}, source=str(path))
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        document.lines["steps", len(steps)] = number
        try:
            steps.append(json.loads(line))
        except ValueError as error:
            document.problems.append(ConfigProblem("", f"not JSON: {error}", number))
    return document


def _over(defaults: SignalValues, step: StepConfig) -> SignalValues:
    given = {
        name: getattr(step, name)
        for name in SignalValues.model_fields
        if name in step.model_fields_set
    }
    return defaults.model_copy(update=given)
