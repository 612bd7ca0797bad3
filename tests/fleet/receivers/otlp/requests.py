"""Requests over HTTP, and what an error answer holds."""

from google.rpc import status_pb2
from tests.support import local_http

from ingero.otlp.codec import (
    build_gauge,
    build_metrics,
    build_number,
)

JSON = {"content-type": "application/json"}
PROTOBUF = {"content-type": "application/x-protobuf"}
ACCEPTED = "otelcol_receiver_accepted_metric_points_total"
REFUSED = "otelcol_receiver_refused_metric_points_total"


class Questions:
    """Asks one node something."""

    def __init__(self, *who):
        self.who = who

    def find_question(self, cluster_id, node_id):
        return "id=1&job=%0D%0A" if (cluster_id, node_id) == self.who else None


def push(node="n1", cluster="c1", score=0.9, cohort="", state="active"):
    attributes = {"ingero.node.state": state, "ingero.cgroup_path_hash": cohort}
    point = build_number(score, 1_795_230_273_280_661_023, attributes)
    resource = {"ingero.node.id": node, "ingero.cluster.id": cluster}
    return build_metrics(
        resource, [build_gauge("ingero.node.health_score", [point])], "ingero.health"
    )


def post(running, body, path="/v1/metrics", headers=JSON, **options):
    return local_http.post(running.url(path), content=body, headers=headers, **options)


# What is wrong with a request.


def error_of(answer):
    if answer.headers["content-type"] == "application/json":
        return answer.json()["code"], answer.json()["message"]
    status = status_pb2.Status.FromString(answer.content)
    return status.code, status.message
