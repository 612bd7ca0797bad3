"""Clients of plain HTTP read no certificate authorities; those of HTTPS trust whom they did."""

import ast
import asyncio
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import trustme

from ingero.agent.events.alert.delivery import build_client
from ingero.agent.events.alert.pagerduty import PagerDutyPager
from ingero.agent.health.transport import TransportSettings, open_http_sender
from ingero.cli.programs.echo_asker import EchoAsker
from ingero.otlp.client.endpoint import parse_endpoint
from ingero.remediation.signed_posts import post_json
from ingero.web_authorities import WebAuthorities

SRC = Path(__file__).parents[2] / "src/ingero"
MAKERS = {"Client", "AsyncClient", "get", "post", "put", "request", "stream"}


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(202)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET  # noqa: N815 - http.server's name

    def log_message(self, *_):
        pass


def _serve(context=None):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def authority():
    return trustme.CA()


@pytest.fixture
def plain():
    server = _serve()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def secure(authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server = _serve(context)
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def _get(url):
    with httpx.Client(verify=WebAuthorities()) as client:
        return client.get(url).status_code


def _get_later(url):
    async def get():
        async with httpx.AsyncClient(verify=WebAuthorities()) as client:
            return (await client.get(url)).status_code

    return asyncio.run(get())


@pytest.mark.parametrize("get", [_get, _get_later])
def test_https_trusts_the_authority_that_the_environment_names(
    get, authority, secure, tmp_path, monkeypatch
):
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert get(secure) == 202


@pytest.mark.parametrize("get", [_get, _get_later])
def test_https_trusts_no_unknown_authority(get, secure, monkeypatch):
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        get(secure)


def test_environment_is_not_asked_where_it_is_not_trusted(authority, secure, tmp_path, monkeypatch):
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with (
        httpx.Client(verify=WebAuthorities(is_env_trusted=False), trust_env=False) as client,
        pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        client.get(secure)


def test_authorities_that_cannot_be_read_fail_the_connection(secure, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    with pytest.raises(httpx.ConnectError, match="No such file"):
        _get(secure)


def _alert(url):
    with build_client(5) as client:
        assert client.post(url).status_code == 202


def _page(url):
    PagerDutyPager("key", url)({"summary": "s"}, "")


def _send(url):
    settings = TransportSettings(
        endpoint=parse_endpoint(url, is_insecure=True, option="--x"), timeout_ns=5_000_000_000
    )
    with open_http_sender(settings).client as client:
        assert client.get(url).status_code == 202


def _ask(url):
    with EchoAsker(url, None, None) as asker:
        assert asker._client.get(url).status_code == 202


@pytest.mark.parametrize(
    "use", [_alert, _page, _send, _ask, lambda url: post_json(url, b"{}", {}, 5)]
)
def test_plain_http_needs_no_authorities(use, plain, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    monkeypatch.setenv("SSL_CERT_DIR", "/nowhere")
    use(plain)


def _calls():
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "httpx"
                and node.func.attr in MAKERS
            ):
                yield f"{path.relative_to(SRC)}:{node.lineno}", node


def test_each_client_says_whom_it_trusts():
    found = dict(_calls())
    assert found
    silent = [
        at for at, call in found.items() if "verify" not in {one.arg for one in call.keywords}
    ]
    assert silent == [], "give verify=WebAuthorities(), so that plain HTTP reads no authorities"
