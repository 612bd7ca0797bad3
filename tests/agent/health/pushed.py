"""A push, and how it is sent."""

from tests.support.pushes import build_status

from ingero.agent.health.push_body import NodeIdentity, build_push
from ingero.agent.health.transport import TransportSettings
from ingero.otlp.client.endpoint import parse_endpoint

SECOND_NS = 1_000_000_000


def push(score=0.94):
    return build_push(NodeIdentity(cluster_id="prod a", node_id="n1"), build_status(score=score))


def settings(url, **more):
    endpoint = parse_endpoint(url, is_insecure=True, option="test")
    return TransportSettings(
        endpoint=endpoint, timeout_ns=5 * SECOND_NS, cluster_id="prod a", **more
    )
