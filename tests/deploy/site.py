"""Every program of ours, really started and fed, with the pages that a Prometheus would scrape."""

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from tests.e2e.agents import Agents, event, health, set_resource
from tests.e2e.test_collectives import N_RANKS, PROTOBUF, job
from tests.echo.process import OPERATOR, Served
from tests.support import local_http

from ingero.otlp.codec import encode_protobuf
from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.testing.waiting import wait_until
from ingero.wire.collectives import build_collectives

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
ECHO_DOORS = ("--otlp-addr", "--otlp-http-addr", "--mcp-addr", "--health-addr")
SERVING = re.compile(r"serving http://(\S+?)/metrics")


@dataclass(frozen=True)
class Page:
    """What Prometheus scrapes.

    Attributes:
        target: ``host:port``.
        token: Bearer, where one is asked for.
    """

    target: str
    token: str | None = None

    def read(self):
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        answer = local_http.get(f"http://{self.target}/metrics", headers=headers, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.text


@contextmanager
def run_program(folder, name, *arguments, environ=None):
    """A program of ours until the context ends; its log."""
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(BIN / arguments[0]), *map(str, arguments[1:])],
            stdout=out, stderr=out, env={**os.environ, **(environ or {})},
        )  # fmt: skip
    try:
        yield process, log
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_page(process, log, pattern=SERVING):
    """The address that a program printed."""

    def find():
        text = log.read_text()
        if process.poll() is not None:
            raise RuntimeError(text)
        found = pattern.search(text)
        return found and found[1]

    return wait_until(find, 60)


class Site:
    """A Fleet that was pushed to, an Echo that it forwards to, and an agent with sink and alerter.

    Attributes:
        pages: What is scraped, by the name of its job in ``deploy/prometheus/prometheus.yml``.
    """

    def __init__(self, agents, pages):
        self.agents = agents
        self.pages = pages
        self.n_rounds = 0

    def push(self):
        """Another round of scores, of which one is low, and of collectives, of which one rank is slow."""
        part, self.n_rounds = self.n_rounds, self.n_rounds + 1
        for rank in range(N_RANKS):
            score = 0.4 if rank == 5 and part else 0.9
            self.agents.push(
                set_resource(health(f"node{rank}", score, cluster="job"), provider="aws")
            )
        if part:
            self.agents.push(event("node5", 1, cluster="job"), "job")
        for run in job(slow=5):
            run.ops["seq"] += 300 * part
            run.ops["entry_ns"] += part * 10_000_000_000_000
            body = encode_protobuf(build_collectives([run], 1_795_230_273_280_661_023))
            self.agents.push_raw(body, PROTOBUF, path="/v1/logs")


def site_config(echo_port):
    """The parts of the shipped configuration on ports that the kernel chooses, with prices and an exporter to Echo."""
    nccl = {
        "judge_interval": "100ms",
        "reorder_window": "100ms",
        "cost_interval": "500ms",
        "rates": {"currency": "USD", "providers": {"aws": {"NVIDIA H100 80GB HBM3": 12.0}}},
    }
    config = build_fleet_config({"quorum": {"statistical_min": 3}}, nccl)
    config["processors"]["memory_limiter"] = {"limit_mib": 2048, "check_interval": "1s"}
    config["exporters"]["otlphttp"] = {
        "endpoint": f"http://127.0.0.1:{echo_port}",
        "headers": {"Authorization": f"Bearer {OPERATOR}"},
    }
    for pipeline in config["service"]["pipelines"].values():
        pipeline["processors"] = ["memory_limiter", *pipeline.get("processors", [])]
        pipeline["exporters"] = [*pipeline["exporters"], "otlphttp"]
    return config


@contextmanager
def run_site(folder):
    """All of it, until the context ends."""
    with ExitStack() as stack:
        echo = stack.enter_context(Served(folder))
        fleet = stack.enter_context(run_fleet(site_config(echo.otlp)))
        agents = Agents(fleet)
        stack.callback(agents.client.close)
        remediate = folder / "remediate.sock"
        pages = {
            "ingero-fleet": Page(fleet.addresses["service.telemetry.metrics"]),
            "ingero-fleet-data": Page(fleet.addresses["exporters.prometheus"]),
            "ingero-echo": Page(f"127.0.0.1:{echo.api}", OPERATOR),
            "ingero-agent": Page(wait_for_page(*stack.enter_context(run_program(
                folder, "fleet-push", "ingero", "fleet-push", "--stub", "--fleet-insecure",
                "--fleet-endpoint", fleet.addresses["receivers.otlp http"],
                "--fleet-cluster-id", "job", "--fleet-node-id", "stub",
                "--fleet-push-interval", "1s", "--fleet-persist-path", folder / "baseline.json",
                "--prometheus", "127.0.0.1:0",
                "--remediate", "--remediate-socket", remediate, "--remediate-gid", "-1",
            )))),
            "ingero-sink": Page(wait_for_page(*stack.enter_context(run_program(
                folder, "sink", "ingero-sink", "--socket-path", remediate, "--listen", "127.0.0.1:0",
            )))),
        }  # fmt: skip
        alerter = folder / "alerter.json"
        alerter.write_text(
            json.dumps({"uds_path": str(remediate), "webhook": {"url": "http://127.0.0.1:9/"}})
        )
        started = run_program(
            folder, "alerter", "ingero-alerter", "--config", alerter, "--listen", "127.0.0.1:0"
        )
        pages["ingero-alerter"] = Page(wait_for_page(*stack.enter_context(started)))
        site = Site(agents, pages)
        site.push()
        wait_until(lambda: _push_and_look(site), 60)
        yield site


def _push_and_look(site):
    site.push()
    text = site.pages["ingero-fleet-data"].read()
    return "ingero_fleet_waiting_cost_total{" in text and "ingero_fleet_straggler{" in text


def read_rules():
    """The shipped rules, by group."""
    return {
        group["name"]: group["rules"]
        for file in sorted((DEPLOY / "prometheus").glob("*.rules.yml"))
        for group in yaml.safe_load(file.read_text())["groups"]
    }


def copy_checkout(folder):
    """This checkout's files as git has them named, as a clone would; the folder."""
    folder.mkdir()
    files = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT)
    packed = subprocess.run(
        ["tar", "--null", "-T", "-", "-cf", "-"],
        cwd=ROOT, input=files, capture_output=True, check=True,
    )  # fmt: skip
    subprocess.run(["tar", "-xf", "-", "-C", folder], input=packed.stdout, check=True)
    return folder


def read_guide(heading="", guide="systemd"):
    """Lines of the commands below a heading of a guide, without it those before the first one."""
    guide = (ROOT / "docs/guides" / f"{guide}.md").read_text()
    part = next(
        one for one in re.split(r"^## ", guide, flags=re.MULTILINE) if one.startswith(heading)
    )
    return "".join(re.findall(r"```bash\n(.*?)```", part, re.DOTALL)).splitlines()
