"""How the remediator reaches an API server, and what it makes of one that is away or refuses."""

import http.server
import os
import subprocess
import sys
import threading
from contextlib import closing

import pytest
from tests.remediation.kubernetes.real_server import REMEDIATOR
from tests.remediation.kubernetes.test_kubernetes import RECORD

from ingero.config.document import parse_document
from ingero.errors import ConfigError, RetryableError
from ingero.remediation.actuators.kubernetes import KubernetesActuator
from ingero.remediation.building import build_actuator
from ingero.remediation.config import build_policy
from ingero.remediation.kubernetes_config import KubernetesConfig
from ingero.testing.clock import ManualClock

IN_POD = """\
mkdir -p /run/secrets && mount -t tmpfs none /run/secrets && mkdir -p {account}
cp {ca} {account}/ca.crt && printf %s {token} > {account}/token && printf gpu > {account}/namespace
exec "$@"
"""


class TestConnection:
    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for mounts of its own")
    def test_in_a_pod_the_service_account_is_taken(self, api, tmp_path):
        if not hasattr(api.server, "authority"):
            pytest.skip("a pod asks over TLS only, which the small server has not")
        account = "/run/secrets/kubernetes.io/serviceaccount"  # /var/run is /run
        script = IN_POD.format(account=account, ca=api.server.authority, token=REMEDIATOR)
        policy = tmp_path / "policy.yaml"
        policy.write_text("action: {kubernetes: {}}\n")
        ask = (
            "import sys; from ingero.remediation.config import load_policy;"
            " from ingero.remediation.building import build_actuator;"
            " from ingero.telemetry.clock import SystemClock;"
            " print(*build_actuator(load_policy(sys.argv[1]), SystemClock()).read_nodes())"
        )
        host, _, port = api.server.url.removeprefix("https://").partition(":")
        environ = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", script, "sh", sys.executable, "-c", ask, policy],
            env=os.environ | environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout.split() == ["n1", "n2", "n3", "n4"], done.stderr

    def test_a_server_that_is_away_may_be_back_later(self, tmp_path):
        with (
            connect(tmp_path, "http://127.0.0.1:9") as actuator,
            pytest.raises(RetryableError, match="API server does not answer"),
        ):
            actuator.read_nodes()

    @pytest.mark.parametrize(
        ("status", "kind", "body"),
        [
            (200, "text/html", b"<html>"),
            (200, "application/json", b"{"),
            (200, "application/json", b'{"items": 5}'),
            (502, "text/html", b"bad gateway"),
            (502, "", b""),
            (503, "application/json", b'{"kind": "Status", "message": "starting"}'),
            (429, "application/json", b'{"kind": "Status", "message": "slower"}'),
        ],
    )
    def test_what_is_no_answer_of_an_api_server_may_be_one_later(
        self, tmp_path, status, kind, body
    ):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                if kind:
                    self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                with connect(tmp_path, f"http://127.0.0.1:{server.server_port}") as actuator:
                    with pytest.raises(RetryableError, match="Kubernetes"):
                        actuator.read_nodes()
                    with pytest.raises(RetryableError, match="Kubernetes"):
                        actuator.apply(RECORD)
            finally:
                server.shutdown()
                thread.join()

    @pytest.mark.parametrize(
        ("text", "description"),
        [
            (None, "not found"),
            ("{", "cannot be used"),
            ("a: b", "lacks 'clusters'"),
            ("[]", "cannot be used"),
            ("{clusters: [], contexts: []}", "No current context"),
            ("{current-context: c, clusters: [], contexts: []}", "Context 'c' not found"),
            (
                "{current-context: c, clusters: [], contexts: [{name: c, context: {cluster: k}}]}",
                "lacks 'k'",
            ),
        ],
    )
    def test_a_kubeconfig_that_cannot_be_used_is_named_with_the_cause(
        self, tmp_path, text, description
    ):
        file = tmp_path / "config"
        if text is not None:
            file.write_text(text)
        policy = f"mode: auto\naction: {{kubernetes: {{kubeconfig: {file}}}}}\n"
        with pytest.raises(ConfigError, match=description) as caught:
            build_actuator(build_policy(parse_document(policy)), ManualClock())
        assert str(file) in str(caught.value)

    def test_a_policy_that_would_do_nothing_is_refused(self):
        policy = "action: {kubernetes: {taint: '', condition: ''}}\n"
        with pytest.raises(ConfigError, match="at least one of taint, cordon and condition"):
            build_policy(parse_document(policy))


def connect(folder, url):
    file = folder / "config"
    file.write_text(
        "{current-context: c, contexts: [{name: c, context: {cluster: k, user: u}}],"
        f" clusters: [{{name: k, cluster: {{server: '{url}'}}}}], users: [{{name: u, user: {{}}}}]}}"
    )
    config = KubernetesConfig(kubeconfig=str(file))
    return closing(KubernetesActuator(config, ManualClock()))
