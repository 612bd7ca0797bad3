"""A Fleet of one's own, for as long as a command needs it: a real `ingero-fleet` process on loopback ports.

The replay, the demo and ``ingero up`` talk to it as an agent would, over its sockets.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Final

import ingero
from ingero.errors import IngeroError, UnsupportedError
from ingero.sim.child import run_tied

START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 10.0
_LISTENS: Final = " listens on "
_RUNNING: Final = "running "
SHIPPED_CONFIG: Final = Path(ingero.__file__).parent / "fleet" / "fleet-config.yaml"
"""The configuration that ships with ingero."""
EPHEMERAL: Final = (
    "receivers.otlp.protocols.grpc.endpoint=127.0.0.1:0",
    "receivers.otlp.protocols.http.endpoint=127.0.0.1:0",
    "extensions.ingero_threshold.agent_endpoint=127.0.0.1:0",
    "extensions.ingero_threshold.admin_endpoint=127.0.0.1:0",
    "extensions.health_check.endpoint=127.0.0.1:0",
    "extensions.zpages.endpoint=127.0.0.1:0",
    "exporters.prometheus.endpoint=127.0.0.1:0",
    "service.telemetry.metrics.address=127.0.0.1:0",
)
"""Settings that move every endpoint of the shipped configuration to a free loopback port."""
_PROGRAM: Final = (
    "from ingero.sim.child import end_with_input; end_with_input();"
    "from ingero.cli.programs.fleet import main; main()"
)


@dataclass(slots=True)
class LocalFleet:
    """A running Fleet.

    Attributes:
        endpoints: ``host:port`` by what listens there, as the service announces it, such as ``receivers otlp http``.
        log: The newest lines it logged.
    """

    endpoints: Mapping[str, str]
    log: deque[str] = field(default_factory=lambda: deque(maxlen=200))

    def find_endpoint(self, *words: str) -> str:
        """The endpoint whose announcement holds all of these words.

        Raises:
            UnsupportedError: Its configuration opens no such endpoint.
        """
        for name, endpoint in self.endpoints.items():
            if all(word in name for word in words):
                return endpoint
        raise UnsupportedError(
            f"the Fleet listens nowhere for {' '.join(words)}; it has {', '.join(self.endpoints)}",
            hint="the configuration needs an otlp receiver with http and the ingero_threshold extension",
        )


@contextmanager
def run_local_fleet(config: Path, overrides: Sequence[str] = ()) -> Iterator[LocalFleet]:
    """Start ``ingero-fleet --config FILE``, wait until it runs, and stop it at the end.

    Args:
        config: Its configuration.
        overrides: ``key=value`` settings, as ``--set`` takes them.

    Yields:
        The running Fleet.

    Raises:
        IngeroError: It did not start; the message holds what it said.
    """
    command = [sys.executable, "-c", _PROGRAM, "--config", str(config)]
    for override in (*overrides, "service.telemetry.logs.encoding=json"):
        command += ["--set", override]
    with run_tied(command, STOP_TIMEOUT_S, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None  # noqa: PT018 - both were asked for
        endpoints: dict[str, str] = {}
        fleet = LocalFleet(endpoints)
        told: SimpleQueue[bool] = SimpleQueue()
        reader = threading.Thread(
            target=_follow, args=(process.stderr, fleet.log, endpoints, told), daemon=True
        )
        reader.start()
        try:
            if not _is_running(told):
                process.kill()
                reader.join(STOP_TIMEOUT_S)
                said = "\n".join(fleet.log) or "it said nothing"
                raise IngeroError(f"ingero-fleet did not start:\n{said}")
            yield fleet
        finally:
            process.stdin.close()
            reader.join(STOP_TIMEOUT_S)


def _is_running(told: SimpleQueue[bool]) -> bool:
    """Wait until the service runs, has given up or takes too long."""
    try:
        return told.get(timeout=START_TIMEOUT_S)
    except Empty:
        return False


def _follow(
    lines: IO[str], log: deque[str], endpoints: dict[str, str], told: SimpleQueue[bool]
) -> None:
    """Read the log until it ends: note endpoints, and tell whether the service came to run."""
    for line in lines:
        try:
            message = str(json.loads(line)["msg"])
        except (ValueError, KeyError, TypeError):
            message = line.rstrip()  # an error before logging is set up
        log.append(message)
        name, separator, endpoint = message.rpartition(_LISTENS)
        if separator:
            endpoints[name] = endpoint
        elif message.startswith(_RUNNING):
            told.put(True)  # noqa: FBT003 - what is told
    told.put(False)  # noqa: FBT003
