"""What is tormented: three Fleets over one NATS server, each in a network namespace, and one Echo behind them.

Every part is a real process that can be killed, stopped and started again where it was. Fleets reach NATS and Echo over
relays on the bridge, so that these keep their loopback addresses.
"""

import os
import signal
import struct
import subprocess
from contextlib import ExitStack, contextmanager

import duckdb
import yaml
from tests.e2e.test_weather import build_library
from tests.support.ports import free_port
from tests.support.relay import Relay

from ingero.sim.cluster.cleanup import open_cleanup
from ingero.sim.cluster.hosts import open_cluster
from ingero.sim.launcher import start
from ingero.sim.local_nats import LocalNats
from ingero.testing.fleet import build_fleet_config

PORT = 4318
TOKEN = "chaos" * 8
N_FLEETS = 3
DISK_BYTES = 192 << 20
"""Of each part's disk; a small one, so that it can be filled."""


class Part:
    """A process that may be away.

    Args:
        name: For people.
        open_life: Makes the context of one life; yields what has a ``pid``.
    """

    def __init__(self, name, open_life):
        self.name = name
        self._open_life = open_life
        self._life = None
        self.pid = 0

    def begin(self):
        """Start it, and wait until it is there."""
        self._life = ExitStack()
        self.pid = self._life.enter_context(self._open_life())

    def kill(self):
        """End it at once, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.end()

    def end(self):
        """End it in order."""
        if self._life is not None:
            self._life.close()
            self._life = None

    def send(self, which):
        """Send it a signal."""
        os.kill(self.pid, which)


class Site:
    """All parts. A context of its own; `begin` starts them.

    Args:
        folder: Where everything is kept.
        stack: Ends what was made.
    """

    def __init__(self, folder, stack):
        self.folder = folder
        cleanup = stack.enter_context(open_cleanup())
        self.cluster = stack.enter_context(open_cluster(N_FLEETS, cleanup))
        self.disks = {}
        for name in ("nats", "echo", *(f"fleet-{at}" for at in range(N_FLEETS))):
            self.disks[name] = _open_disk(folder / name, cleanup)
        self.library = build_library(folder)
        (folder / "clock").write_bytes(bytes(8))
        self._nats = LocalNats(self.disks["nats"])
        self.nats = Part("nats", self._run_nats)
        self.echo_port = free_port()
        self.echo = Part("echo", self._run_echo)
        self.fleets = [
            Part(f"fleet {at}", lambda at=at: self._run_fleet(at)) for at in range(N_FLEETS)
        ]
        self._stack = stack

    @property
    def parts(self):
        """Every part."""
        return [self.nats, self.echo, *self.fleets]

    @property
    def endpoints(self):
        """Where Fleets take pushes."""
        if self.is_isolated:
            return [f"{host.address}:{PORT}" for host in self.cluster.hosts]
        return [f"127.0.0.1:{port}" for port in self._ports]

    @property
    def is_isolated(self):
        """Whether every Fleet has a network of its own."""
        return self.cluster.isolation == "network namespaces"

    def begin(self):
        """Start everything; it ends with the stack."""
        self._ports = [free_port() for _ in range(N_FLEETS)]
        for part in self.parts:
            self._stack.callback(part.end)
        self.nats.begin()
        self.echo.begin()
        self._nats_relay = self._open_relay(self._nats.url.removeprefix("nats://"))
        self._echo_relay = self._open_relay(f"127.0.0.1:{self.echo_port}")
        for fleet in self.fleets:
            fleet.begin()

    def cut(self, at, *, is_cut):
        """Take the network of a Fleet away, or give it back."""
        host = self.cluster.hosts[at]
        state = "down" if is_cut else "up"
        subprocess.run([*host.bridge, "ip", "link", "set", host.port, state], check=True)

    def step_clock(self, seconds):
        """Step the wall clock of the Fleet that only receives."""
        with (self.folder / "clock").open("r+b") as file:
            file.write(struct.pack("=q", seconds))

    def count_queued(self):
        """Batches that wait in Fleets' queues on disk."""
        return sum(
            len(list(self.disks[f"fleet-{at}"].glob("storage/*/[0-9]*"))) for at in range(N_FLEETS)
        )

    def read_echo(self):
        """Rows of collectives, of verdicts and of logs that Echo has; it must have ended."""
        with duckdb.connect(str(self.disks["echo"] / "echo.db"), read_only=True) as db:
            return [
                db.execute(query).fetchall()
                for query in (
                    "SELECT DISTINCT rank, seq FROM collectives",
                    "SELECT rank, verdict, before, epoch_ns(ts) FROM verdicts ORDER BY ts",
                    "SELECT DISTINCT body FROM logs WHERE event_name = 'chaos.row'",
                )
            ]

    def _open_relay(self, target):
        relay = Relay(target, self.cluster.address)
        self._stack.callback(relay.close)
        return relay.address

    @contextmanager
    def _run_nats(self):
        with self._nats.run():
            yield self._nats.pid

    @contextmanager
    def _run_echo(self):
        settings = {
            "rate_per_second": 1_000_000,
            "rate_burst": 1_000_000,
            "min_free_space": "1MiB",
        }
        arguments = [
            "serve", "--db", str(self.disks["echo"] / "echo.db"), "--insecure-no-tls",
            "--auth-token", TOKEN, "--otlp-http-addr", f"127.0.0.1:{self.echo_port}",
        ]  # fmt: skip
        for name in ("otlp", "mcp", "health"):
            arguments += [f"--{name}-addr", "127.0.0.1:0"]
        for name, value in settings.items():
            arguments += ["--set", f"{name}={value}"]
        with start("ingero.cli.programs.echo", arguments) as program:
            program.wait_until_ready()
            yield program.process.pid

    @contextmanager
    def _run_fleet(self, at):
        host = self.cluster.hosts[at]
        endpoint = self.endpoints[at]
        config = build_fleet_config(
            {"max_expected_nodes": 100},
            nccl={"judge_interval": "200ms", "reorder_window": "1s", "patience": "60s"},
        )
        config["receivers"]["otlp"]["protocols"] = {"http": {"endpoint": endpoint}}
        config["extensions"]["file_storage"] = {
            "directory": str(self.disks[f"fleet-{at}"] / "storage"),
            "timeout": "5s",
        }
        config["exporters"]["otlphttp"] = {
            "endpoint": f"http://{self._echo_relay}",
            "headers": {"Authorization": f"Bearer {TOKEN}"},
            "timeout": "2s",
            "sending_queue": {"storage": "file_storage", "num_consumers": 1, "queue_size": 100_000},
            "retry_on_failure": {
                "initial_interval": "100ms",
                "max_interval": "1s",
                "max_elapsed_time": "0s",
            },
        }
        service = config["service"]
        service["extensions"] = [*service["extensions"], "file_storage"]
        service["pipelines"]["logs"]["processors"] = ["ingero", "nccl"]
        service["pipelines"]["logs"]["exporters"] = ["otlphttp"]
        service["storage"] = {
            "nats": {
                "servers": [f"nats://{self._nats_relay}"],
                "timeout": "500ms",
                "judge": at > 0,
                "max_size": "96MiB",
            }
        }
        file = self.folder / f"fleet-{at}.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        stepped = {"LD_PRELOAD": str(self.library), "CLOCK_STEP_FILE": str(self.folder / "clock")}
        with start(
            "ingero.cli.programs.fleet",
            ["--config", str(file)],
            prefix=host.prefix,
            environ=stepped if at == 0 else None,
        ) as program:
            try:
                program.wait_until_ready()
                yield program.process.pid
            finally:
                with (self.folder / f"fleet-{at}.log").open("a", encoding="utf-8") as log:
                    log.write(program.log + "\n--- ended\n")


def _open_disk(folder, cleanup):
    """A small file system of its own as root, else a folder."""
    folder.mkdir(parents=True)
    if os.geteuid() == 0:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
        subprocess.run(mount, check=True)
        cleanup.add("umount", "-l", str(folder))
    return folder
