"""Pushes as agents make them, built from the recorded bodies."""

import json
from contextlib import contextmanager
from pathlib import Path

import psutil
from tests.support import local_http

from ingero.testing.fleet import run_fleet

SAMPLES = Path(__file__).parents[1] / "data" / "wire_samples"
JSON = {"content-type": "application/json"}


def sample(name):
    return json.loads((SAMPLES / name).read_text())


def set_resource(body, **attributes):
    """Replace resource attributes by key suffix: ``node_id`` is ``ingero.node.id``."""
    for entry in body["resourceMetrics"]:
        for attribute in entry["resource"]["attributes"]:
            for name, value in attributes.items():
                if attribute["key"] == f"ingero.{name.replace('_', '.')}":
                    attribute["value"] = {"stringValue": value}
    return body


def health(
    node, score=0.94, *, cluster, state="active", cohort="8a5edab282632443", name="push_active.json"
):
    """A recorded push under another name, with another score."""
    body = set_resource(sample(name), node_id=node, cluster_id=cluster)
    for metric in body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]:
        if metric["name"] == "ingero.node.health_score":
            (point,) = metric["gauge"]["dataPoints"]
            point["asDouble"] = score
            for attribute in point["attributes"]:
                if attribute["key"] == "ingero.node.state":
                    attribute["value"]["stringValue"] = state
                if attribute["key"] == "ingero.cgroup_path_hash":
                    attribute["value"]["stringValue"] = cohort
    return body


def event(node, value, *, cluster):
    return set_resource(sample(f"straggler_event_{value}.json"), node_id=node, cluster_id=cluster)


class Agents:
    """A client that pushes to one collector over one kept-alive connection."""

    def __init__(self, fleet):
        self.fleet = fleet
        self.client = local_http.open_client(timeout=120, follow_redirects=False)

    @property
    def push_url(self):
        """Where metrics are posted."""
        return self.fleet.url("receivers.otlp http", "/v1/metrics")

    @property
    def fleet_rss_bytes(self):
        """Resident memory of the collector."""
        return psutil.Process(self.fleet.process.pid).memory_info().rss

    def push(self, body, cluster=None, **more):
        params = {"cluster_id": cluster} if cluster else None
        return self.client.post(self.push_url, json=body, params=params, **more)

    def push_raw(self, content, headers=JSON, cluster=None, path=None):
        url = self.fleet.url("receivers.otlp http", path or "/v1/metrics")
        params = {"cluster_id": cluster} if cluster else None
        return self.client.post(url, content=content, headers=headers, params=params)

    def admin(self, page, **query):
        url = self.fleet.url("extensions.ingero_threshold admin", f"/api/v1/admin/{page}")
        return self.client.get(url, params=query).json()

    def threshold(self, **query):
        url = self.fleet.url("extensions.ingero_threshold agents", "/api/v1/threshold")
        return self.client.get(url, params=query)

    def metrics(self, what="exporters.prometheus"):
        return self.client.get(self.fleet.url(what, "/metrics")).text

    def own(self, name, **labels):
        """One series of the service's own metrics; None when it is not there."""
        return find_series(self.metrics("service.telemetry.metrics"), name, **labels)


@contextmanager
def fleet_and_agents(config):
    """A collector of its own with agents that push to it."""
    with run_fleet(config) as fleet:
        agents = Agents(fleet)
        with agents.client:
            yield agents


def find_series(text, name, **labels):
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for one in family.samples:
            if one.name == name and labels.items() <= one.labels.items():
                return one.value
    return None


def told(answer):
    """The threshold and quorum that an answer carries, None where it has neither; both or none."""
    headers = answer.headers
    pair = headers.get("x-ingero-threshold"), headers.get("x-ingero-quorum-met")
    assert (pair[0] is None) == (pair[1] is None)
    return None if pair[0] is None else (float(pair[0]), pair[1])
