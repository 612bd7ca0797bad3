"""Pushes over gRPC, and over TLS with certificates of both sides."""

import socket
from concurrent import futures
from dataclasses import replace

import grpc
import pytest
import trustme
from tests.agent.health.pushed import SECOND_NS, push, settings

from ingero.agent.health.cache import HeaderOutcome, ThresholdHeaders
from ingero.agent.health.transport import GrpcTransport, PushReply
from ingero.cli.push_settings import check_tls_files
from ingero.otlp.codec.export import decode_protobuf
from ingero.otlp.names import Signal
from ingero.wire.push import ResourceCache, read_push


class Export(grpc.GenericRpcHandler):
    """OTLP's metrics service; answers as told."""

    def __init__(self):
        self.pushes = []
        self.metadata = {}
        self.refuse = None
        self.answer = (("ingero-threshold", "0.9"), ("ingero-quorum-met", "true"))

    def service(self, details):
        assert details.method.endswith("MetricsService/Export")
        return grpc.unary_unary_rpc_method_handler(self.export)

    def export(self, body, context):
        self.metadata = dict(context.invocation_metadata())
        self.pushes += read_push(decode_protobuf(body, Signal.METRICS), ResourceCache())
        context.send_initial_metadata(self.answer)
        if self.refuse is not None:
            code, trailing = self.refuse
            context.set_trailing_metadata(trailing)
            context.abort(code, "no")
        return b""


@pytest.fixture
def grpc_fleet():
    handler = Export()
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    transport = GrpcTransport(settings(f"127.0.0.1:{port}", headers={"X-Tenant": "blue"}))
    yield handler, transport
    transport.close()
    server.stop(None).wait()


def test_grpc_tells_the_same_and_hears_the_same(grpc_fleet):
    handler, transport = grpc_fleet
    assert transport.send(push(), 0) == PushReply(
        True, "OK", ThresholdHeaders(HeaderOutcome.HIT, 0.9, True)
    )
    assert handler.pushes[0].health_score == 0.94
    assert handler.metadata["x-tenant"] == "blue"
    assert handler.metadata["ingero.cluster.id"] == "prod a"


@pytest.mark.parametrize("cluster_id", ["größe", "a\x01b"])
def test_a_cluster_that_cannot_be_metadata_is_pushed_all_the_same(grpc_fleet, cluster_id):
    handler, transport = grpc_fleet
    other = GrpcTransport(replace(transport.settings, cluster_id=cluster_id))
    assert other.send(push(), 0).is_taken
    other.close()
    assert "ingero.cluster.id" not in handler.metadata


def test_grpc_refusals_carry_the_threshold_and_the_pause(grpc_fleet):
    handler, transport = grpc_fleet
    handler.refuse = (grpc.StatusCode.RESOURCE_EXHAUSTED, (("retry-after", "7"),))
    answer = transport.send(push(), 0)
    assert answer.headers == ThresholdHeaders(HeaderOutcome.HIT, 0.9, True)
    assert answer.retry_after_ns == 7 * SECOND_NS
    assert not answer.is_taken
    assert not answer.is_cut_off
    handler.refuse = (grpc.StatusCode.UNAVAILABLE, (("grpc-retry-pushback-ms", "1500"),))
    assert transport.send(push(), 0).retry_after_ns == 1_500_000_000


def test_grpc_without_a_fleet_is_cut_off():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        transport = GrpcTransport(settings(f"127.0.0.1:{unused.getsockname()[1]}"))
        answer = transport.send(push(), 0)
        transport.close()
    assert answer.is_cut_off
    assert answer.detail.startswith("UNAVAILABLE")


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    names = [str(folder / name) for name in ("ca.pem", "cert.pem", "key.pem")]
    authority.cert_pem.write_to_path(names[0])
    pair.cert_chain_pems[0].write_to_path(names[1])
    pair.private_key_pem.write_to_path(names[2])
    (folder / "key.pem").chmod(0o600)
    return authority, pair, tuple(names)


def test_mutual_tls_over_grpc(tls_files):
    authority, pair, (ca, cert, key) = tls_files
    handler = Export()
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=(handler,))
    credentials = grpc.ssl_server_credentials(
        [(pair.private_key_pem.bytes(), pair.cert_chain_pems[0].bytes())],
        root_certificates=authority.cert_pem.bytes(),
        require_client_auth=True,
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    url = f"https://127.0.0.1:{port}"
    transport = GrpcTransport(settings(url, ca_file=ca, cert_file=cert, key_file=key))
    assert transport.send(push(), 0).is_taken
    transport.close()
    stranger = GrpcTransport(settings(url, ca_file=ca))
    assert not stranger.send(push(), 0).is_taken
    stranger.close()
    server.stop(None).wait()


def test_tls_files_are_looked_at_and_a_loose_key_is_refused(tls_files, tmp_path):
    _, _, files = tls_files
    assert check_tls_files(("", "", ""), is_insecure=True, allows_loose_key=False) == []
    assert check_tls_files(files, is_insecure=False, allows_loose_key=False) == []
    loose = tmp_path / "key.pem"
    loose.write_text("key")
    loose.chmod(0o640)
    bad = (str(tmp_path), "", str(loose))
    problems = check_tls_files(bad, is_insecure=True, allows_loose_key=False)
    assert [problem.path for problem in problems] == [
        "--fleet-tls-cert",
        "--fleet-insecure",
        "--fleet-tls-ca",
        "--fleet-tls-key",
    ]
    problems = check_tls_files(bad, is_insecure=False, allows_loose_key=True)
    assert [problem.path for problem in problems] == ["--fleet-tls-cert", "--fleet-tls-ca"]
