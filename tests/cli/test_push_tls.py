"""Which certificate files an agent needs: what `--fleet-tls-*` and `ingero.yaml` say, against real TLS."""

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trustme
from click.testing import CliRunner
from tests.support.pushes import build_status

from ingero.agent.health.push_body import NodeIdentity, build_push
from ingero.agent.health.service import build_transport
from ingero.agent.health.signals.node_facts import GpuFacts
from ingero.cli.commands.fleet_push import FleetPushConfig
from ingero.cli.commands.trace.config import TraceConfig
from ingero.cli.main import cli
from ingero.cli.options import take_config
from ingero.cli.push_settings import build_settings, check_tls_files

OPTIONS = {"ca": "--fleet-tls-ca", "cert": "--fleet-tls-cert", "key": "--fleet-tls-key"}


class Taking(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        """Nothing on stderr."""


class Quiet(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """A refused handshake is what some tests want."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    authority, clients = trustme.CA(), trustme.CA()
    found = {name: str(folder / f"{name}.pem") for name in (*OPTIONS, "clients")}
    authority.cert_pem.write_to_path(found["ca"])
    clients.cert_pem.write_to_path(found["clients"])
    client = clients.issue_cert("gpu-1.example")
    client.cert_chain_pems[0].write_to_path(found["cert"])
    client.private_key_pem.write_to_path(found["key"])
    (folder / "key.pem").chmod(0o600)
    return authority, found


@pytest.fixture
def serve(files):
    """Serves OTLP/HTTP over TLS, with or without client certificates; gives the URL."""
    authority, found = files
    servers = []

    def start(*, asks_clients):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        if asks_clients:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(found["clients"])
        server = Quiet(("127.0.0.1", 0), Taking)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"https://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def read(name, args):
    """The agent's settings that a command line of `trace` or `fleet-push` makes."""
    with CliRunner().isolation(env={}):
        root = cli.make_context("ingero", [name], resilient_parsing=True)
        with cli.commands[name].make_context(name, args, parent=root) as context:
            params = dict(context.params)
            if name == "trace":
                return take_config(TraceConfig, params).build_push()
            config = take_config(FleetPushConfig, params)
            return build_settings(config.push, config.remediate, GpuFacts())


def push(settings):
    status = build_status()
    transport = build_transport(settings)
    reply = transport.send(build_push(NodeIdentity(cluster_id="c", node_id="n"), status), 0)
    transport.close()
    return reply


@pytest.mark.parametrize("name", ["trace", "fleet-push"])
def test_the_authority_alone_is_enough_for_a_fleet_that_asks_for_no_certificate(
    serve, files, tmp_path, name
):
    url = serve(asks_clients=False)
    file = tmp_path / "ingero.yaml"
    file.write_text(f"fleet: {{endpoint: '{url}', cluster_id: c, tls_ca: {files[1]['ca']}}}\n")
    assert push(read(name, ["--config", str(file)])).is_taken
    file.write_text(f"fleet: {{endpoint: '{url}', cluster_id: c, tls_ca: {files[1]['clients']}}}\n")
    assert "CERTIFICATE_VERIFY_FAILED" in push(read(name, ["--config", str(file)])).detail


def test_a_certificate_and_its_key_go_with_the_authorities_of_the_system(serve, files, monkeypatch):
    found = files[1]
    monkeypatch.setenv("SSL_CERT_FILE", found["ca"])
    given = ["--fleet-endpoint", serve(asks_clients=True), "--fleet-cluster-id", "c"]
    pair = [OPTIONS["cert"], found["cert"], OPTIONS["key"], found["key"]]
    assert push(read("fleet-push", [*given, *pair])).is_taken
    assert not push(read("fleet-push", given)).is_taken


@pytest.mark.parametrize("one", ["cert", "key"])
@pytest.mark.parametrize("has_authority", [True, False])
def test_a_certificate_without_its_key_and_a_key_without_its_certificate_are_refused(
    files, one, has_authority
):
    given = tuple(
        files[1][name] if name == one or (name == "ca" and has_authority) else ""
        for name in OPTIONS
    )
    (problem,) = check_tls_files(given, is_insecure=False, allows_loose_key=False)
    other = {"cert": "key", "key": "cert"}[one]
    assert str(problem) == f"{OPTIONS[other]}: is missing: it goes with {OPTIONS[one]}"
