"""A served database in a process of its own, and what real clients send it."""

import json
import os
import re
import shlex
import subprocess
import time
from pathlib import Path

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from tests.echo.one_token import ADDRESSES, ECHO
from tests.support import local_http

OPERATOR, TEAM_A, TEAM_B = "op-" + "o" * 29, "aa-" + "a" * 29, "bb-" + "b" * 29
ACL = f"""
- {{key_name: operator, token: {OPERATOR}, allowed_clusters: ["*"]}}
- {{key_name: team-a, token: {TEAM_A}, allowed_clusters: [train-1, train-2]}}
- {{key_name: team-b, token: {TEAM_B}, allowed_clusters: [prod-9]}}
"""
SERVICES = {
    "metrics": "opentelemetry.proto.collector.metrics.v1.MetricsService",
    "logs": "opentelemetry.proto.collector.logs.v1.LogsService",
    "traces": "opentelemetry.proto.collector.trace.v1.TraceService",
}


class Served:
    """`ingero-echo serve` with three bearers; ``program`` runs instead of it."""

    def __init__(self, folder, *more, program=(str(ECHO),), acl=ACL):
        self.db = folder / "echo.db"
        bearers = folder / "acl.yaml"
        bearers.write_text(acl)
        bearers.chmod(0o600)
        self.log = folder / "echo.log"
        command = [*program, "serve", "--insecure-no-tls", "--db", str(self.db), *ADDRESSES]
        command += ["--bearer-acl-file", str(bearers), "--set", "min_free_space=1MiB", *more]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        line = self.process.stdout.readline()
        ports = re.findall(r"127\.0\.0\.1:(\d+)", line)
        assert len(ports) == 4, self.log.read_text()
        self.grpc, self.otlp, self.api, self.health = (int(port) for port in ports)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def push(self, body, signal="metrics", token=OPERATOR, kind="application/x-protobuf", **more):
        """OTLP/HTTP; a dict goes as JSON."""
        headers = {"authorization": f"Bearer {token}", "content-type": kind} | more.pop(
            "headers", {}
        )
        if isinstance(body, dict):
            import msgspec

            body, headers["content-type"] = msgspec.json.encode(body), "application/json"
        url = f"http://127.0.0.1:{self.otlp}/v1/{signal}"
        return local_http.post(url, content=body, headers=headers, timeout=120, **more)

    def call(self, body, signal="metrics", token=OPERATOR, **metadata):
        """OTLP/gRPC with a real client; the response's bytes, or grpc.RpcError."""
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc}") as channel:
            export = channel.unary_unary(f"/{SERVICES[signal]}/Export")
            given = [("authorization", f"Bearer {token}")] if token else []
            return export(body, metadata=[*given, *metadata.items()], timeout=120)

    def sql(self, text, token=OPERATOR):
        answer = local_http.post(
            f"http://127.0.0.1:{self.api}/api/v2/sql",
            json={"sql": text, "time_window": "99d"},
            headers={"authorization": f"Bearer {token}"},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["rows"]

    def metric(self, name, **labels):
        """The value of one series of /metrics."""
        headers = {"authorization": f"Bearer {OPERATOR}"}
        text = local_http.get(f"http://127.0.0.1:{self.api}/metrics", headers=headers).text
        wanted = ",".join(f'{key}="{value}"' for key, value in labels.items())
        found = re.search(
            rf"^{name}{{{wanted}}} (\S+)$" if wanted else rf"^{name} (\S+)$", text, re.MULTILINE
        )
        assert found, text
        return float(found[1])

    def state(self, path):
        """Status of the health listener."""
        return local_http.get(f"http://127.0.0.1:{self.health}{path}", timeout=5).status_code

    def audit(self, **wanted):
        """Values of the audit lines of OTLP requests that have these."""
        found = []
        for line in self.log.read_text().splitlines():
            head, is_audit, rest = line.partition(" ingero.echo.audit: otlp ")
            if is_audit and "=" not in head:
                pairs = (pair.split("=", 1) for pair in shlex.split(rest))
                values = {name: read_value(text) for name, text in pairs}
                if wanted.items() <= values.items():
                    found.append(values)
        return found

    def rss(self):
        """Resident bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def read_value(text):
    """A value of a log line: what is no JSON is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def metrics(points, name="m", cluster="train-1", node="n1", kind="gauge", **resource):
    """A request in JSON with one metric; ``points`` are OTLP/JSON data points."""
    attributes = {"ingero.cluster.id": cluster, "ingero.node.id": node, **resource}
    metric = {"name": name, kind: {"dataPoints": points}}
    if kind in {"histogram", "exponentialHistogram", "sum"}:
        metric[kind]["aggregationTemporality"] = 2
    entry = {
        "resource": {"attributes": pairs(attributes)},
        "scopeMetrics": [{"metrics": [metric]}],
    }
    return {"resourceMetrics": [entry]}


def logs(records, cluster="train-1", node="n1"):
    attributes = {"ingero.cluster.id": cluster, "ingero.node.id": node}
    entry = {
        "resource": {"attributes": pairs(attributes)},
        "scopeLogs": [{"logRecords": records}],
    }
    return {"resourceLogs": [entry]}


def spans(records, cluster="train-1", node="n1"):
    attributes = {"ingero.cluster.id": cluster, "ingero.node.id": node}
    entry = {"resource": {"attributes": pairs(attributes)}, "scopeSpans": [{"spans": records}]}
    return {"resourceSpans": [entry]}


def point(value=1.0, at_ns=None, **attributes):
    return {
        "timeUnixNano": str(time.time_ns() if at_ns is None else at_ns),
        "asDouble": value,
        "attributes": pairs(attributes),
    }


def pairs(attributes):
    return [
        {"key": key, "value": any_value(value)}
        for key, value in attributes.items()
        if value is not None
    ]


def any_value(value):
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": value}


def rejected(answer):
    """Items refused and the words, of an answer to OTLP/HTTP metrics."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/json":
        said = answer.json()["partialSuccess"]
        number = next((value for key, value in said.items() if key.startswith("rejected")), 0)
        return int(number), said.get("errorMessage", "")
    said = ExportMetricsServiceResponse.FromString(answer.content).partial_success
    return said.rejected_data_points, said.error_message
