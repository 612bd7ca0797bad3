"""A real Prometheus that scrapes a collector."""

import json
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from tests.support import local_http

from ingero.testing.waiting import wait_until

PROMETHEUS_3 = Path(__file__).parents[2] / ".cache/prometheus3/prometheus"


def has_prometheus():
    try:
        subprocess.run(["prometheus", "--version"], capture_output=True, check=True)
    except FileNotFoundError:
        return False
    return True


needs_prometheus = pytest.mark.skipif(
    not has_prometheus(), reason="prometheus (Debian: prometheus) is not installed"
)

each_prometheus = pytest.mark.parametrize(
    "binary",
    [
        pytest.param("prometheus", id="debian", marks=needs_prometheus),
        pytest.param(
            PROMETHEUS_3,
            id="3",
            marks=pytest.mark.skipif(
                not PROMETHEUS_3.exists(), reason="no Prometheus 3: scripts/install_prometheus3"
            ),
        ),
    ],
)
"""Debian's own, and a 3 where there is one."""


class Prometheus:
    def __init__(self, url, process=None):
        self.url = url
        self._process = process

    def stop(self):
        self._process.terminate()
        self._process.wait(120)

    def query(self, expression):
        """Value of each series of the result, by its labels as JSON."""
        answer = local_http.get(f"{self.url}/api/v1/query?query={quote(expression)}").json()
        assert answer["status"] == "success", answer
        return {
            json.dumps(one["metric"], sort_keys=True): float(one["value"][1])
            for one in answer["data"]["result"]
        }

    def exemplars(self, expression):
        """Labels and value of each exemplar of the last hour, by the series it belongs to."""
        now = time.time()
        asked = {"query": expression, "start": now - 3600, "end": now + 60}
        answer = local_http.get(f"{self.url}/api/v1/query_exemplars", params=asked).json()
        assert answer["status"] == "success", answer
        return {
            one["seriesLabels"]["__name__"]: [
                (e["labels"], float(e["value"])) for e in one["exemplars"]
            ]
            for one in answer["data"]
        }

    def names(self):
        """Every series that it has."""
        return set(local_http.get(f"{self.url}/api/v1/label/__name__/values").json()["data"])

    def number(self, expression):
        """The only value of the result; None when there is none."""
        found = list(self.query(expression).values())
        assert len(found) <= 1, found
        return found[0] if found else None


@contextmanager
def run_prometheus(folder, targets, rules=None, **job):
    """A Prometheus that scrapes these every second, by job name."""
    jobs = [
        {
            "job_name": name,
            "scrape_interval": "1s",
            "scrape_timeout": "1s",
            "static_configs": [{"targets": [target]}],
            **job,
        }
        for name, target in targets.items()
    ]
    config = {"global": {"evaluation_interval": "1s"}, "scrape_configs": jobs}
    if rules is not None:
        (folder / "rules.yml").write_text(yaml.safe_dump(rules))
        config["rule_files"] = [str(folder / "rules.yml")]
    with serve_config(folder, config) as prometheus:
        yield prometheus


@contextmanager
def serve_config(folder, config, *flags, binary="prometheus"):
    """A Prometheus with this configuration, on a port of its choice."""
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    log = folder / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
                "--log.format=json",
                *flags,
            ],
            stdout=out,
            stderr=out,
        )

    def find_address():
        if process.poll() is not None:
            raise RuntimeError(log.read_text())
        for line in log.read_text().splitlines():
            entry = json.loads(line)
            if entry.get("msg") == "Listening on":
                return entry["address"]
        return None

    try:
        url = f"http://{wait_until(find_address)}"
        # It listens before it has read what it stored, and answers 503 until then.
        wait_until(lambda: local_http.get(f"{url}/-/ready").status_code == 200)
        yield Prometheus(url, process)
    finally:
        process.terminate()
        process.wait(120)
