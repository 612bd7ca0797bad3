"""The guide for docker and docker compose, command by command, in a Docker engine of its own: `make test-compose`, minutes, PyPI.

The images of a registry are made from Debian's archive, Grafana's is left out.
"""

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.deploy.site import BIN, ROOT, copy_checkout
from tests.e2e.agents import health
from tests.support import local_http
from tests.support.capabilities import has_all_capabilities

from ingero.sim.cluster.cleanup import open_cleanup
from ingero.sim.cluster.hosts import open_cluster
from ingero.testing.waiting import wait_until

FILES = os.environ.get("INGERO_REGISTRY_IMAGES", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("images"),
    pytest.mark.skipif(
        not FILES or shutil.which("dockerd") is None,
        reason="INGERO_REGISTRY_IMAGES names no images for an engine: `make test-compose` makes them",
    ),
]
GUIDE = (ROOT / "docs/guides/containers.md").read_text()
PYTHON = "docker.io/library/python:3.13-slim-bookworm"
PROMETHEUS = "docker.io/prom/prometheus"
PROMETHEUS_AS = (  # as that project's image starts it
    "USER 65534:65534",
    'ENTRYPOINT ["/bin/prometheus"]',
    'CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]',
    "WORKDIR /prometheus",
)
FORWARDS = Path("/proc/sys/net/ipv4/ip_forward")
JOBS = ("ingero-fleet", "ingero-fleet-data", "ingero-echo")
PING = "import socket, sys; socket.create_connection((sys.argv[1], 9), 10)"
SERVICES = ("fleet", "echo", "prometheus")


class Engine:
    """A Docker engine, and a checkout in which the guide's commands are run."""

    def __init__(self, socket, checkout):
        self.checkout = checkout
        self.environ = {
            **os.environ, "DOCKER_HOST": f"unix://{socket}", "DOCKER_CONFIG": str(ROOT / ".cache/docker"),
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }  # fmt: skip

    def try_to(self, commands):
        return subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", commands],
            cwd=self.checkout, env=self.environ, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def run(self, commands):
        done = self.try_to(commands)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def take(self, file, name, changes=()):
        """Make an image of a file system."""
        changed = [word for change in changes for word in ("--change", change)]
        subprocess.run(
            ["docker", "import", *changed, str(file), name], env=self.environ, check=True
        )

    def compose(self, arguments):
        return self.run(f"docker compose -f deploy/containers/compose.yaml {arguments}")

    def find(self, service):
        """What the engine says of a service's container; nothing while there is none."""
        name = self.compose(f"ps -aq {service}").strip()
        return json.loads(self.run(f"docker inspect {name}"))[0] if name else None

    @contextmanager
    def up(self, command, log):
        """The guide's command in the foreground, which a person ends with Ctrl-C."""
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.checkout, env=self.environ, stdout=out,
                stderr=out, start_new_session=True,
            )  # fmt: skip
        try:
            yield lambda: process.poll() is None or pytest.fail(log.read_text()[-5000:])
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait(120)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    if Path("/sys/class/net/docker0").exists():
        pytest.skip("another Docker engine runs on this machine: its network would be this one's")
    # Of a table that is not in use `iptables-save` says nothing, and `iptables-restore` would leave what came to it.
    for table in ("filter", "nat"):
        subprocess.run(["iptables", "-t", table, "-L"], capture_output=True, check=True)
    before, forwards = subprocess.check_output(["iptables-save"]), FORWARDS.read_text()
    log, socket = folder / "log", folder / "docker.sock"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                "dockerd", "--host", f"unix://{socket}", "--data-root", str(folder / "data"),
                "--exec-root", str(folder / "run"), "--pidfile", str(folder / "pid"),
            ],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        engine = Engine(socket, copy_checkout(folder / "checkout"))
        wait_until(lambda: engine.try_to("docker info").returncode == 0, 60)
        engine.take(Path(FILES) / "python.tar", PYTHON)
        engine.take(Path(FILES) / "prometheus.tar", PROMETHEUS, PROMETHEUS_AS)
        yield engine
        engine.run("docker ps -aq | xargs -r docker rm -f; docker network prune -f")
    finally:
        process.terminate()
        process.wait(60)
        subprocess.run(["iptables-restore"], input=before, check=True)
        FORWARDS.write_text(forwards)
        subprocess.run(["ip", "link", "del", "docker0"], check=False)


def read_commands(heading):
    """The commands below a heading of the guide, each on one line."""
    part = next(
        one for one in re.split(r"^## ", GUIDE, flags=re.MULTILINE) if one.startswith(heading)
    )
    text = "".join(re.findall(r"```bash\n(.*?)```", part, re.DOTALL))
    return text.replace("\\\n", "").splitlines()


def test_compose_starts_what_sends_to_and_scrapes_each_other_and_keeps_its_rows(engine, tmp_path):
    make_secrets, up = read_commands("Fleet, Echo, Prometheus and Grafana")
    engine.run(make_secrets)
    secrets = engine.checkout / "deploy/containers/secrets"
    token = (secrets / "token").read_text().strip()
    context = ssl.create_default_context(cafile=secrets / "ca.crt")

    def is_healthy(service):
        found = engine.find(service)
        return found is not None and found["State"].get("Health", {}).get("Status") == "healthy"

    def ask(sql):
        answer = local_http.post(
            "https://localhost:18081/api/v2/sql", json={"sql": sql, "time_window": "99999d"},
            headers={"authorization": f"Bearer {token}"}, verify=context, timeout=30,
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        return answer.text

    def has_node():
        return "n1" in ask("SELECT DISTINCT node_id FROM events")

    def targets():
        try:
            answer = local_http.get("http://localhost:9090/api/v1/targets", timeout=10).json()
        except httpx.TransportError:
            return {}
        return {one["labels"]["job"]: one["health"] for one in answer["data"]["activeTargets"]}

    for start in ("first", "second"):
        with engine.up(f"{up} {' '.join(SERVICES)}", tmp_path / start) as is_running:
            wait_until(lambda: is_running() and is_healthy("fleet") and is_healthy("echo"), 1200)
            if start == "first":
                push = local_http.post(
                    "http://localhost:4318/v1/metrics", json=health("n1", cluster="c")
                )
                assert push.status_code == 200
            wait_until(has_node, 60)
            wait_until(lambda: targets() == dict.fromkeys(JOBS, "up"), 90)
            groups = local_http.get("http://localhost:9090/api/v1/rules").json()["data"]["groups"]
            assert len(groups) > 3
            assert {rule["health"] for group in groups for rule in group["rules"]} <= {
                "ok",
                "unknown",
            }
        for service in SERVICES:
            found = engine.find(service)
            assert found["State"]["ExitCode"] == 0, (
                service,
                (tmp_path / start).read_text()[-3000:],
            )
            if service != "prometheus":
                assert found["HostConfig"]["ReadonlyRootfs"]
                assert found["HostConfig"]["CapDrop"] == ["ALL"]
                assert found["Config"]["User"] == "65532:65532"
        engine.compose("down")


@pytest.fixture(scope="module")
def agent_commands(engine):
    """The guide's two commands; with its own image, which is built."""
    engine.run("make images IMAGES=ingero BUILDER=docker")
    return read_commands("The agent in a container")


@pytest.mark.parametrize("is_privileged", [True, False], ids=["privileged", "capabilities"])
def test_the_agent_in_a_container_traces_a_program_of_its_host(
    engine, agent_commands, tmp_path, is_privileged
):
    if is_privileged and not has_all_capabilities():
        pytest.skip("this machine has not every capability that --privileged gives")
    trace, explain = (
        one.replace("-v /var/lib/ingero:", f"-v {tmp_path}:") for one in agent_commands
    )
    if not is_privileged:
        (instead,) = re.findall(r"In place of `--privileged` these capabilities do: `(.*?)`", GUIDE)
        trace = trace.replace("--privileged", instead)
    simulated = [str(BIN / "ingero"), "sim", "run", "sync", "steps=100000000"]
    job = subprocess.Popen(simulated, stdout=subprocess.DEVNULL)
    try:
        told = engine.run(trace)
        assert job.poll() is None
    finally:
        job.kill()
        job.wait()
    assert re.search(r"cudaDeviceSync +\d", told), told
    explained = engine.run(explain)
    assert "Sync-bound" in explained, explained
    assert "who       workload (pid " in explained


def test_hosts_of_up_reach_each_other_though_dockers_firewall_forwards_nothing(engine):
    # As Docker sets it where nothing was forwarded before.
    subprocess.run(["iptables", "-P", "FORWARD", "DROP"], check=True)
    assert Path("/proc/sys/net/bridge/bridge-nf-call-iptables").read_text() == "1\n"
    with open_cleanup() as cleanup, open_cluster(2, cleanup) as cluster:
        ping = [*cluster.hosts[1].prefix, sys.executable, "-c", PING, cluster.hosts[0].address]
        done = subprocess.run(ping, timeout=30, capture_output=True, text=True, check=False)
    assert "refused" in done.stderr  # it was there, and nobody listens
