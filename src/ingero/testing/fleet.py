"""A real ``ingero-fleet`` process on ports that the kernel chose, for tests that speak to it from outside."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import yaml

ResultT = TypeVar("ResultT")

_LISTENS: Final = re.compile(
    r"ingero\.fleet: (?P<who>\S+)(?: (?P<what>\S+))? listens on (?P<at>\S+)"
)
_ANY_PORT: Final = "127.0.0.1:0"
_START_S: Final = 60.0
_STOP_S: Final = 30.0


def build_fleet_config(
    ingero: Mapping[str, Any] | None = None, nccl: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A configuration with every door open on loopback; the ``nccl`` processor only when it has settings.

    A threshold is told as soon as there is a quorum, unless ``quorum.settle_time`` says otherwise.
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


class FleetProcess:
    """A running collector.

    Attributes:
        addresses: ``host:port`` by what listens there, such as ``receivers.otlp http``.
        process: The process.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        self.addresses: dict[str, str] = {}
        self._log = folder / "fleet.log"
        file = folder / "fleet.yaml"
        file.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        code = "import sys; from ingero.cli.programs.fleet import main; sys.exit(main())"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, "--config", str(file)], stdout=log, stderr=log
            )

    def wait_until_running(self) -> None:
        """Read the addresses from its log.

        Raises:
            RuntimeError: It ended instead; the message is its log.
        """
        wait_until(self._find_running, _START_S)

    @property
    def log(self) -> str:
        """Everything it wrote so far."""
        return self._log.read_text(encoding="utf-8")

    @property
    def rss_bytes(self) -> int:
        """Its resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) * 1024

    def url(self, what: str, path: str = "") -> str:
        """``http://host:port/path`` of what listens as ``what``."""
        return f"http://{self.addresses[what]}{path}"

    @property
    def push_url(self) -> str:
        """Where metrics are posted."""
        return self.url("receivers.otlp http", "/v1/metrics")

    def stop(self) -> int:
        """Ask it to end; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(_STOP_S)

    def _find_running(self) -> bool:
        text = self.log
        if self.process.poll() is not None:
            raise RuntimeError(f"ingero-fleet ended with {self.process.returncode}:\n{text}")
        for match in _LISTENS.finditer(text):
            name = f"{match['who']} {match['what']}" if match["what"] else match["who"]
            self.addresses[name] = match["at"]
        return "ingero.fleet: running" in text


@contextmanager
def run_fleet(config: Mapping[str, Any]) -> Iterator[FleetProcess]:
    """Start a collector, wait until it listens, and stop it at the end whatever happened."""
    with tempfile.TemporaryDirectory(prefix="ingero-fleet-") as folder:
        fleet = FleetProcess(config, Path(folder))
        try:
            fleet.wait_until_running()
            yield fleet
        finally:
            fleet.stop()


def wait_until(look: Callable[[], ResultT], timeout_s: float = 30.0) -> ResultT:
    """Look until there is something to see; for what another process does in its own time.

    Raises:
        TimeoutError: Nothing came within ``timeout_s``, which is a limit for hangs and not an expectation.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"not seen within {timeout_s} s")
        time.sleep(0.02)
