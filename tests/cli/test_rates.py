"""`ingero rates`: the operator's price list is checked, shown as Fleet reads it, and fetched over HTTPS only."""

import json
import re
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme
import yaml

from ingero.cli.main import cli, run_program
from ingero.config.model import parse_model
from ingero.fleet.processors.collectives.rates import RatesConfig

PRICES = """
currency_name: USD
currency_symbol: $
providers:
  ec2: {NVIDIA H100 80GB HBM3: 12.29, NVIDIA L4 24GB: 0.85}
  lambda: {NVIDIA H100 80GB HBM3: 2.49}
fallback_rate: 0.0
"""


@pytest.fixture
def prices(tmp_path):
    path = tmp_path / "gpu_rates.yaml"
    path.write_text(PRICES)
    return path


def ask(capsys, *arguments):
    status = run_program(cli, ["rates", *map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_list_is_shown_with_its_currency(prices, capsys):
    status, out, _ = ask(capsys, "show", prices)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].split() == ["ec2", "NVIDIA", "H100", "80GB", "HBM3", "$12.29", "an", "hour"]
    assert (len(lines), lines[-1]) == (4, "anything else: unknown")
    told = json.loads(ask(capsys, "show", prices, "--provider", "AWS", "--json")[1])
    assert (told["n_models"], told["fallback_rate"], told["currency_name"]) == (3, None, "USD")
    assert list(told["providers"]) == ["ec2"]


@pytest.mark.parametrize(
    ("provider", "gpu", "rate"),
    [
        ("aws", "NVIDIA H100 80GB HBM3", 12.29),
        ("aws", "NVIDIA L4", 0.85),
        ("gcp", "NVIDIA L4", None),
    ],
)
def test_one_price_is_what_fleet_would_charge(prices, capsys, provider, gpu, rate):
    _, out, _ = ask(capsys, "show", prices, "--provider", provider, "--gpu", gpu, "--json")
    assert json.loads(out)["rate"] == rate


def test_printed_configuration_is_what_fleet_takes(prices, capsys):
    _, out, _ = ask(capsys, "show", prices, "--fleet")
    rates = parse_model(RatesConfig, yaml.safe_load(out)["processors"]["nccl"]["rates"])
    assert rates.currency == "USD"
    assert rates.fallback_rate is None
    assert rates.providers["lambda"] == {"NVIDIA H100 80GB HBM3": 2.49}


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("fallback_rate: 0.0", "", "fallback_rate"),
        ("fallback_rate: 0.0", "fallback_rate: -1", "fallback_rate"),
        ("2.49", "-2.49", "lambda"),
        ("2.49", "cheap", "lambda"),
        ("currency_symbol: $", "currency_sign: $", "currency_symbol"),
        ("currency_name: USD", "currency_name: ''", "currency_name"),
    ],
)
def test_list_with_a_mistake_is_refused_and_the_mistake_named(prices, capsys, old, new, named):
    prices.write_text(PRICES.replace(old, new))
    status, _, err = ask(capsys, "show", prices)
    assert status == 2
    assert named in err


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def serve(authority, tmp_path):
    """A function that serves answers by path over TLS; returns the base address and the authority's file."""
    servers = []
    pem = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(pem)

    def start(answers):
        class Answers(BaseHTTPRequestHandler):
            def do_GET(self):
                status, where, body = answers[self.path]
                self.send_response(status)
                if where:
                    self.send_header("location", where)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"https://127.0.0.1:{server.server_port}", pem

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_fetched_list_takes_the_file_s_place(serve, prices, capsys):
    fresh = PRICES.replace("12.29", "9.99") + "# as of today\n"
    base, pem = serve({"/old": (302, "/new", b""), "/new": (200, "", fresh.encode())})
    status, out, err = ask(
        capsys, "update", "--url", f"{base}/old", "--ca-cert", pem, "-o", prices, "--json"
    )
    assert status == 0, err
    told = json.loads(out)
    assert (told["source"], told["n_models"], told["n_providers"]) == (f"{base}/new", 3, 2)
    assert prices.read_text() == fresh
    assert prices.stat().st_mode & 0o777 == 0o644
    assert sorted(p.name for p in prices.parent.glob("*rates*")) == ["gpu_rates.yaml"]


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        ((302, "http://127.0.0.1:1/x", b""), 1, "not an https address"),
        ((302, "https://[::1/x", b""), 1, "Invalid URL in location header"),
        ((302, "/list", b""), 1, "more than 10 redirects"),
        ((404, "", b""), 1, "HTTP 404"),
        ((200, "", b"a" * ((1 << 20) + 1)), 1, "larger than 1 MiB"),
        ((200, "", b"\xff\xfe"), 1, "not UTF-8"),
        ((200, "", b"providers: {}"), 1, "no price list"),
        ((200, "", PRICES.replace("USD", "${env:HOME}").encode()), 1, "no price list"),
    ],
)
def test_what_is_no_list_changes_nothing(serve, prices, capsys, answer, status, said):
    base, pem = serve({"/list": answer})
    got, _, err = ask(
        capsys, "update", "--url", f"{base}/list", "--ca-cert", pem, "--output", prices
    )
    assert (got, said in err) == (status, True), err
    assert prices.read_text() == PRICES


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--url", "https://[::1/x"], "error: 'https://[::1/x' is not an https address"),
        (["--url", "https://127.0.0.1:1/x", "--timeout", "0"], "'0' is too short"),
    ],
)
def test_an_address_or_a_time_that_is_none_is_said_and_changes_nothing(prices, capsys, more, said):
    status, _, err = ask(capsys, "update", "-o", prices, *more)
    assert (status, said in err) == (2, True), err
    assert prices.read_text() == PRICES


def test_plain_http_and_unknown_authorities_are_refused(serve, prices, capsys):
    assert ask(capsys, "update", "--url", "http://127.0.0.1/x", "-o", prices)[0] == 2
    base, _ = serve({"/list": (200, "", PRICES.encode())})
    status, _, err = ask(capsys, "update", "--url", f"{base}/list", "-o", prices)
    assert (status, "certificate" in err.lower()) == (1, True)


@pytest.mark.parametrize("wrong", [["--gpu", "x"], ["--fleet", "--json"]])
def test_options_that_do_not_go_together(prices, capsys, wrong):
    assert ask(capsys, "show", prices, *wrong)[0] == 2


def test_the_shipped_list_is_one_and_says_where_and_when_its_prices_come_from(capsys):
    shipped = Path(__file__).resolve().parents[2] / "deploy/gpu_rates.yaml"
    head = [line for line in shipped.read_text().splitlines() if line.startswith("#")]
    assert any(line.startswith("# Provenance: ") for line in head)
    assert re.search(r"^# Date: .*\b20\d\d-\d\d-\d\d\b", "\n".join(head), re.MULTILINE)
    status, out, err = ask(capsys, "show", shipped, "--fleet")
    assert status == 0, err
    rates = parse_model(RatesConfig, yaml.safe_load(out)["processors"]["nccl"]["rates"])
    assert rates.providers["aws"]["NVIDIA H100 80GB HBM3"] == 12.29
    assert rates.fallback_rate is None
