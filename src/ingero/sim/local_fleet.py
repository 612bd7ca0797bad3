"""A Fleet for as long as a command needs it: a real `ingero-fleet` process on free loopback ports.

The replay, the demo and ``ingero up`` use it as agents do, over its sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import ingero
from ingero.sim.launcher import LaunchedProgram, launch

OTLP_HTTP: Final = "receivers.otlp http"
ADMIN: Final = "extensions.ingero_threshold admin"
_SHIPPED_CONFIG: Final = Path(ingero.__file__).parent / "fleet" / "fleet-config.yaml"
_ENDPOINTS: Final = (
    "receivers.otlp.protocols.grpc.endpoint",
    "receivers.otlp.protocols.http.endpoint",
    "extensions.ingero_threshold.agent_endpoint",
    "extensions.ingero_threshold.admin_endpoint",
    "extensions.health_check.endpoint",
    "extensions.zpages.endpoint",
    "exporters.prometheus.endpoint",
    "service.telemetry.metrics.address",
)
"""Every endpoint of the shipped configuration."""


def run_local_fleet(overrides: Sequence[str] = ()) -> AbstractContextManager[LaunchedProgram]:
    """Start ``ingero-fleet`` with the shipped configuration, and stop it at the end.

    Args:
        overrides: ``key=value`` settings, as ``--set`` takes them.

    Raises:
        IngeroError: It did not start; the message holds its log.
    """
    settings = (*(f"{endpoint}=127.0.0.1:0" for endpoint in _ENDPOINTS), *overrides)
    given = [part for setting in settings for part in ("--set", setting)]
    return launch("ingero.cli.programs.fleet", ["--config", str(_SHIPPED_CONFIG), *given])
