"""Echo's chart: its settings, and what Prometheus is given to scrape it with."""

import json
import ssl
import subprocess

import pytest
import yaml
from tests.deploy.chart_probes import wait_for
from tests.deploy.charts import Node, find, find_pod, helm, needs_helm, render
from tests.deploy.site import BIN, DEPLOY
from tests.support import local_http

from ingero.echo.service.config import EchoConfig

pytestmark = [pytest.mark.slow, needs_helm]

DISK = {"encryptionAcknowledged": True}
TENANT, OPERATOR = "t" * 32, "o" * 32
BEARERS = [
    {"key_name": "tenant", "token": TENANT, "allowed_clusters": ["c"]},
    {"key_name": "prometheus", "token": OPERATOR, "allowed_clusters": ["*"], "scopes": ["read"]},
]


def find_endpoint(**values):
    values["serviceMonitor"] = {"enabled": True, **values.get("serviceMonitor", {})}
    objects = render("ingero-echo", persistence=DISK, **values)
    (endpoint,) = find(objects, "ServiceMonitor")["spec"]["endpoints"]
    return objects, endpoint


def scrape(node, endpoint, trusted):
    """The page as Prometheus asks for it: by address, with the secrets that the monitor names.

    Args:
        node: Where Echo runs.
        endpoint: Of the monitor.
        trusted: Authorities of the system in PEM, which count where the monitor names none.
    """
    tls = endpoint["tlsConfig"]
    if "ca" in tls:
        ref = tls["ca"]["secret"]
        trusted = node.secret(ref["name"])[ref["key"]].decode()
    ref = endpoint["authorization"]["credentials"]
    bearer = node.secret(ref["name"])[ref["key"]].decode()
    with local_http.open_client(verify=ssl.create_default_context(cadata=trusted)) as client:
        return client.get(
            f"{endpoint['scheme']}://127.0.0.1:{node.port(8081)}/metrics",
            headers={"authorization": f"Bearer {bearer}"},
            extensions={"sni_hostname": tls["serverName"]},
            timeout=30,
        )


def test_prometheus_scrapes_an_echo_with_bearers_and_a_certificate_of_a_known_authority(
    folder, authority
):
    made = authority.issue_cert("echo.example")
    secrets = {
        "acme": {
            "tls.crt": made.cert_chain_pems[0].bytes(),
            "tls.key": made.private_key_pem.bytes(),
        },
        "bearers": {"bearers.yaml": yaml.safe_dump(BEARERS).encode()},
        "of-prometheus": {"bearer": OPERATOR.encode()},
    }
    objects, endpoint = find_endpoint(
        tls={"secretName": "acme"},
        auth={"secretName": "bearers", "aclKey": "bearers.yaml"},
        serviceMonitor={
            "tokenSecret": {"name": "of-prometheus", "key": "bearer"},
            "serverName": "echo.example",
        },
        config={"min_free_space": "1MiB"},
    )
    node = Node(folder, objects, secrets)
    with node.start("echo") as (process, log):
        wait_for(node, "echo", process, log)
        scraped = scrape(node, endpoint, authority.cert_pem.bytes().decode())
    assert scraped.status_code == 200
    assert "ingero_echo_store_up 1" in scraped.text


def test_prometheus_scrapes_an_echo_with_the_charts_own_certificate_and_one_bearer(folder):
    objects, endpoint = find_endpoint(config={"min_free_space": "1MiB"})
    node = Node(folder, objects, {"ingero-echo-auth": {"token": TENANT.encode()}})
    with node.start("echo") as (process, log):
        wait_for(node, "echo", process, log)
        scraped = scrape(node, endpoint, "")
    assert scraped.status_code == 200
    assert "ingero_echo_store_up 1" in scraped.text


@pytest.mark.parametrize(
    ("values", "authority_of"),
    [
        ({}, ("site-ingero-echo-tls", "ca.crt")),
        ({"serviceMonitor": {"caSecret": None, "tokenSecret": None, "serverName": None}}, ("site-ingero-echo-tls", "ca.crt")),
        ({"tls": {"secretName": "acme"}}, None),
        ({"tls": {"secretName": "acme"}, "serviceMonitor": {"caSecret": {"name": "acme"}}}, ("acme", "ca.crt")),
        ({"serviceMonitor": {"caSecret": {"name": "site", "key": "root.pem"}}}, ("site", "root.pem")),
    ],
    ids=["own", "an older release's", "public", "with its authority", "another secret"],
)  # fmt: skip
def test_prometheus_trusts_the_authority_that_is_named_or_else_its_systems(values, authority_of):
    _, endpoint = find_endpoint(**values)
    found = endpoint["tlsConfig"].get("ca")
    assert (found and (found["secret"]["name"], found["secret"]["key"])) == authority_of
    assert endpoint["tlsConfig"]["serverName"] == "site-ingero-echo"
    assert endpoint["authorization"]["credentials"] == {"name": "ingero-echo-auth", "key": "token"}


def test_a_monitor_that_would_ask_with_the_file_of_bearers_is_not_rendered():
    chart = str(DEPLOY / "helm/ingero-echo")
    given = [
        "--set",
        "persistence.encryptionAcknowledged=true",
        "--set",
        "auth.aclKey=bearers.yaml",
    ]
    status, said = helm("template", "e", chart, *given, "--set", "serviceMonitor.enabled=true")
    assert status != 0
    assert "serviceMonitor.tokenSecret.name is needed with auth.aclKey" in said
    assert helm("template", "e", chart, *given)[0] == 0


def print_defaults():
    return yaml.safe_load(
        subprocess.run(
            [BIN / "ingero-echo", "config", "--defaults"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )


ADDRESSES = {
    "otlp_addr": "otlp-grpc",
    "otlp_http_addr": "otlp-http",
    "mcp_addr": "mcp",
    "health_addr": "health",
}


@pytest.mark.parametrize(
    ("changed", "host"),
    [
        ({}, "0.0.0.0"),
        ({"health_addr": "0.0.0.0:9999", "mcp_addr": None}, "0.0.0.0"),
        (
            {
                "otlp_addr": "[::]:4317",
                "otlp_http_addr": "[::]:4318",
                "mcp_addr": "[::]:8081",
                "health_addr": "[::]:8080",
            },
            "[::]",
        ),
    ],
    ids=["the program's own defaults", "other ports", "IPv6"],
)
def test_echo_listens_where_the_pod_is_probed_and_served_whatever_its_settings_say(changed, host):
    settings = print_defaults() | changed
    assert settings.pop("db") == "~/.ingero/echo.db"
    objects = render("ingero-echo", persistence=DISK, config=settings)
    found = yaml.safe_load(find(objects, "ConfigMap")["data"]["echo.yaml"])
    (container,) = find_pod(objects)["spec"]["containers"]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert {key: found[key] for key in ADDRESSES} == {
        key: f"{host}:{ports[port]}" for key, port in ADDRESSES.items()
    }
    (data,) = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "data"]
    assert found["db"].startswith(f"{data}/")
    assert found["retention"] == settings["retention"]


@pytest.mark.parametrize(
    ("settings", "is_taken"),
    [
        ({"db": "~/.ingero/echo.db"}, False),
        ({"db": "/tmp/echo.db"}, False),
        ({"db": "/var/lib/ingero-echo/other.db"}, True),
        ({"db": "~/.ingero/echo.db", "store": "clickhouses://echo@rows:9440/ingero"}, True),
    ],
)
def test_a_database_that_would_go_with_the_pod_is_not_rendered(settings, is_taken):
    status, said = helm(
        "template", "e", str(DEPLOY / "helm/ingero-echo"),
        "--set", "persistence.storageClass=x", "--set-json", f"config={json.dumps(settings)}",
    )  # fmt: skip
    assert (status == 0) is is_taken, said
    assert ("config.db must be below /var/lib/ingero-echo" in said) is not is_taken


def test_a_replica_answers_from_the_volume_of_backups_and_makes_none():
    folder = "/var/lib/ingero-echo-backups"
    objects = render(
        "ingero-echo",
        persistence=DISK,
        backups={"existingClaim": "echo-backups"},
        config={"replica_of": folder},
    )
    found = yaml.safe_load(find(objects, "ConfigMap")["data"]["echo.yaml"])
    assert EchoConfig.model_validate(found).replica_of == folder
    (container,) = find_pod(objects)["spec"]["containers"]
    assert folder in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_notes_read_a_token_from_the_secret_only_where_it_has_one():
    given = ["--dry-run=client", "--set", "persistence.storageClass=x"]
    chart = str(DEPLOY / "helm/ingero-echo")
    status, said = helm("install", "e", chart, *given)
    assert status == 0, said
    assert "get secret ingero-echo-auth -o jsonpath='{.data.token}'" in said
    status, said = helm("install", "e", chart, *given, "--set", "auth.aclKey=bearers.yaml")
    assert status == 0, said
    assert "jsonpath" not in said
    assert "one of the file bearers.yaml in secret ingero-echo-auth" in said
