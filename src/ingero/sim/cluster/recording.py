"""Keeps what the agents of a run pushed of its collectives: Fleet writes it down, and it becomes one recording."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ingero.errors import ConfigError
from ingero.otlp.codec import decode_export
from ingero.otlp.names import ContentType, Signal
from ingero.sim.cluster.result import Progress, UpSettings, describe_faults
from ingero.units import NS_PER_S
from ingero.wire.collectives import read_collectives

if TYPE_CHECKING:
    from ingero.model.collectives import CollectiveRun

_PUSHES: Final = "pushes.jsonl"


@contextmanager
def open_recording(
    settings: UpSettings, progress: Progress, folder: Path
) -> Iterator[tuple[str, ...]]:
    """Settings with which a Fleet keeps what it receives; that becomes a recording when the context ends.

    It is there whole or not at all.

    Enter it before the Fleet starts: a Fleet that has ended has written everything.

    Args:
        settings: Of the run; its ``record`` names the file.
        progress: Read at the end.
        folder: For what Fleet writes.

    Raises:
        ConfigError: The file cannot be written.
    """
    if settings.record is None:
        yield ()
        return
    # Arrow is large, and most runs are not recorded.
    from ingero.job_traces.operations import write_operations  # noqa: PLC0415

    part = settings.record.with_name(f"{settings.record.name}.{os.getpid()}.part")
    try:
        part.touch(exist_ok=False)  # what takes no file is known now, not when the run is over
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"--record {settings.record}: {reason}", hint="name a file in a folder that takes one"
        ) from error
    pushes = folder / _PUSHES
    try:
        yield (f"exporters.file.path={pushes}", "service.pipelines.logs.exporters=[debug, file]")
        labels = describe_run(settings)
        write_operations(part, iter_pushed(pushes), labels, progress.injected_wall_ns)
        part.replace(settings.record)
    finally:
        part.unlink(missing_ok=True)


def describe_run(settings: UpSettings) -> dict[str, Any]:
    """What is true of a run, as labels of its recording."""
    job = settings.job
    return {
        "job": job.file.name if job else "simulated",
        "arguments": list(job.arguments) if job else [],
        "n_ranks": settings.n_ranks,
        "seed": settings.seed,
        "push_interval_s": settings.push_interval_ns / NS_PER_S,
        "faults": describe_faults(settings),
    }


def iter_pushed(pushes: Path) -> Iterator[CollectiveRun]:
    """Every run of collectives in what a Fleet's file exporter wrote."""
    with pushes.open("rb") as lines:
        for line in lines:
            yield from read_collectives(decode_export(line, Signal.LOGS, ContentType.JSON)).runs
