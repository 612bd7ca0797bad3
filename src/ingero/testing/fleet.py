"""A real ``ingero-fleet`` process on ports that the kernel chose, for tests that speak to it from outside."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from ingero.sim.launcher import LaunchedProgram, launch
from ingero.testing.waiting import wait_until

_ANY_PORT: Final = "127.0.0.1:0"


def build_fleet_config(
    ingero: Mapping[str, Any] | None = None, nccl: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A configuration with every endpoint on a free loopback port; the ``nccl`` processor only when it has settings.

    A threshold is sent as soon as there is a quorum, unless ``quorum.settle_time`` says otherwise.
    """
    given = dict(ingero or {})
    given["quorum"] = {"settle_time": "0s"} | dict(given.get("quorum", {}))
    config: dict[str, Any] = {
        "receivers": {
            "otlp": {"protocols": {p: {"endpoint": _ANY_PORT} for p in ("grpc", "http")}}
        },
        "processors": {"ingero": given},
        "exporters": {"prometheus": {"endpoint": _ANY_PORT}, "debug": {}},
        "extensions": {
            "ingero_threshold": {"agent_endpoint": _ANY_PORT, "admin_endpoint": _ANY_PORT}
        },
        "service": {
            "extensions": ["ingero_threshold"],
            "telemetry": {"metrics": {"address": _ANY_PORT}},
            "pipelines": {
                "metrics": {
                    "receivers": ["otlp"],
                    "processors": ["ingero"],
                    "exporters": ["prometheus"],
                },
                "traces": {"receivers": ["otlp"], "exporters": ["debug"]},
                "logs": {"receivers": ["otlp"], "exporters": ["debug"]},
            },
        },
    }
    if nccl is not None:
        config["processors"]["nccl"] = dict(nccl)
        for name in ("metrics", "logs"):
            pipeline = config["service"]["pipelines"][name]
            pipeline["processors"] = [*pipeline.get("processors", []), "nccl"]
    return config


@contextmanager
def run_fleet(
    config: Mapping[str, Any] | Path,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Iterator[LaunchedProgram]:
    """Start a collector, wait until it takes data, and stop it at the end whatever happened.

    Args:
        config: A configuration, or the file that holds it; its endpoints should have port 0.
        overrides: ``--set`` assignments.
        environ: Added to this process's environment.

    Raises:
        IngeroError: It did not start; the message holds its log.
    """
    with tempfile.TemporaryDirectory(prefix="ingero-fleet-") as folder:
        if isinstance(config, Path):
            file = config
        else:
            file = Path(folder) / "fleet.yaml"
            file.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        given = [part for setting in overrides for part in ("--set", setting)]
        arguments = ["--config", str(file), *given]
        with launch("ingero.cli.programs.fleet", arguments, environ=environ) as fleet:
            yield fleet


def wait_for_line(program: LaunchedProgram, text: str) -> str:
    """Wait until a program logs a line with this text; that line.

    Raises:
        AssertionError: It did not within half a minute; the message holds its log.
    """

    def find() -> str:
        return next((line for line in program.log.splitlines() if text in line), "")

    try:
        return wait_until(find)
    except TimeoutError as error:
        raise AssertionError(f"no {text!r} in:\n{program.log}") from error
