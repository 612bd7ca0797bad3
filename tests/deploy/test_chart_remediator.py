"""The remediator in Fleet's chart: what it may do, what it is given for that, and when it is not rendered."""

import base64
import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.deploy.chart_cases import CASES, objects_of
from tests.deploy.chart_probes import wait_for
from tests.deploy.charts import Node, find, find_pod, helm, needs_helm, render
from tests.deploy.site import BIN, DEPLOY, ROOT
from tests.support import local_http

from ingero.config.document import parse_document
from ingero.remediation.config import build_policy
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S

pytestmark = [pytest.mark.slow, needs_helm]


def test_the_remediator_beside_fleet_reads_its_verdicts_and_no_kubernetes(folder):
    objects = objects_of("fleet-remediator")
    assert not {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"} & {
        one["kind"] for one in objects
    }
    egress = find(objects, "NetworkPolicy")["spec"]["egress"]
    assert 8443 in {port["port"] for rule in egress for port in rule["ports"]}
    node = Node(folder, objects, {"webhook": {"secret": base64.b64encode(b"s" * 32)}})
    with node.start("fleet") as (process, log), node.start("remediator") as (second, second_log):
        wait_for(node, "fleet", process, log)
        wait_for(node, "remediator", second, second_log, "livenessProbe")
        page = f"http://127.0.0.1:{node.port(9467)}/metrics"
        looked = r"^ingero_remediator_polls_total\S* [1-9]"
        wait_until(lambda: re.search(looked, local_http.get(page).text, re.MULTILINE), 60)
    assert (folder / "volumes/journal/journal.db").exists()


def test_a_remediator_that_changes_nodes_has_the_rights_and_the_token_for_that_alone():
    objects = objects_of("fleet-remediator-kubernetes")
    role = find(objects, "ClusterRole")
    rights = {
        (verb, what)
        for rule in role["rules"]
        for what in rule["resources"]
        for verb in rule["verbs"]
    }
    assert rights == {
        ("get", "nodes"), ("list", "nodes"), ("patch", "nodes"), ("patch", "nodes/status"),
    }  # fmt: skip
    binding = find(objects, "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    pod = find_pod(objects)["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert binding["subjects"][0]["name"] == pod["serviceAccountName"]
    mounts = {
        one["name"]: {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
        for one in pod["containers"]
    }
    assert mounts["remediator"]["kubernetes"] == "/var/run/secrets/kubernetes.io/serviceaccount"
    assert "kubernetes" not in mounts["fleet"]
    egress = find(objects, "NetworkPolicy")["spec"]["egress"]
    assert {443, 6443} <= {port["port"] for rule in egress for port in rule["ports"]}


def test_a_remediator_that_taints_devices_may_write_rules_and_change_no_node():
    role = find(objects_of("fleet-remediator-device"), "ClusterRole")
    rights = {
        (group, what): set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for what in rule["resources"]
    }
    assert rights == {
        ("resource.k8s.io", "resourceslices"): {"list"},
        ("resource.k8s.io", "devicetaintrules"): {"list", "create", "delete"},
    }


def test_a_remediator_that_tells_nvsentinel_has_its_socket_a_token_for_it_alone_and_no_role():
    objects = objects_of("fleet-remediator-nvsentinel")
    assert not {"ClusterRole", "ClusterRoleBinding"} & {one["kind"] for one in objects}
    pod = find_pod(objects)["spec"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    (source,) = volumes["nvsentinel-token"]["projected"]["sources"]
    token = source["serviceAccountToken"]
    assert token["audience"] == "platform-connector.nvsentinel.nvidia.com"
    assert volumes["nvsentinel"]["hostPath"]["path"] == "/var/run/nvsentinel"
    assert "kubernetes" not in volumes
    containers = {one["name"]: one for one in pod["containers"]}
    mounts = {one["name"]: one for one in containers["remediator"]["volumeMounts"]}
    assert not {"nvsentinel", "nvsentinel-token"} & {
        one["name"] for one in containers["fleet"]["volumeMounts"]
    }
    said = read_policy(objects).action.nvsentinel
    assert said.token_file == f"{mounts['nvsentinel-token']['mountPath']}/{token['path']}"
    assert said.socket == f"{mounts['nvsentinel']['mountPath']}/nvsentinel.sock"
    rights = containers["remediator"]["securityContext"]
    assert (rights["runAsUser"], rights["capabilities"]) == (0, {"drop": ["ALL"]})
    assert "runAsUser" not in containers["fleet"]["securityContext"]


def test_a_remediator_with_links_has_their_key_and_a_page_behind_the_service_for_named_peers():
    objects = objects_of("fleet-remediator-link")
    pod = find_pod(objects)["spec"]
    containers = {one["name"]: one for one in pod["containers"]}
    mounts = {one["name"]: one for one in containers["remediator"]["volumeMounts"]}
    assert "approval" not in {one["name"] for one in containers["fleet"]["volumeMounts"]}
    link = read_policy(objects).approval.link
    assert link.key_file == f"{mounts['approval']['mountPath']}/key"
    ports = {one["name"]: one["containerPort"] for one in containers["remediator"]["ports"]}
    assert str(link.listen) == f"0.0.0.0:{ports['approval']}"
    service = find(objects, "Service")["spec"]["ports"]
    assert [one["targetPort"] for one in service if one["name"] == "approval"] == ["approval"]
    (rule,) = [
        one
        for one in find(objects, "NetworkPolicy")["spec"]["ingress"]
        if {"port": "approval"} in one["ports"]
    ]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]
    assert "approval" not in {
        one["name"] for one in find(objects_of("fleet-remediator"), "Service")["spec"]["ports"]
    }


@pytest.mark.parametrize(
    ("listen", "link_listen", "host"),
    [
        ("127.0.0.1:9467", "127.0.0.1:9468", "0.0.0.0"),  # as the guide has them
        ("0.0.0.0:9999", "[::]:9500", "0.0.0.0"),
        (None, None, "0.0.0.0"),
        ("[::]:9467", "[::]:9468", "[::]"),
    ],
)
def test_a_remediator_listens_where_the_pod_is_probed_and_served_whatever_its_policy_says(
    listen, link_listen, host
):
    guide = (ROOT / "docs/guides/remediator.md").read_text()
    assert {"listen: 127.0.0.1:9467", "listen: 127.0.0.1:9468"} <= set(
        re.findall(r"listen: [\d.:]+", guide)
    )
    values = json.loads(json.dumps(CASES["fleet-remediator-link"][1]))
    policy = values["remediator"]["policy"]
    policy["listen"] = listen
    policy["approval"]["link"] |= {"listen": link_listen, "labels": ["ana"]}
    objects = render("ingero-fleet", **values)
    (container,) = [
        one for one in find_pod(objects)["spec"]["containers"] if one["name"] == "remediator"
    ]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    found = read_policy(objects)
    probed = container["livenessProbe"]["httpGet"]["port"]
    assert str(found.listen) == f"{host}:{ports[probed]}"
    assert str(found.approval.link.listen) == f"{host}:{ports['approval']}"
    assert found.approval.link.labels == ("ana",)


def test_a_remediator_beside_a_fleet_with_an_echo_sends_its_audit_there(folder, authority):
    objects = objects_of("fleet-remediator-audit")
    key = base64.b64encode(b"s" * 32)
    secrets = {
        "echo-ca": {"ca.crt": authority.cert_pem.bytes()},
        "ingero-echo-auth": {"token": b"e" * 32},
        "webhook": {"secret": key},
        "approval": {
            "key": key,
            "bot": key,
            "slack": b"https://hooks.slack.example/services/T/B/x",
        },
    }
    node = Node(folder, objects, secrets)
    with node.start("fleet") as (process, log), node.start("remediator") as (second, second_log):
        wait_for(node, "fleet", process, log)
        wait_for(node, "remediator", second, second_log, "livenessProbe")
        policy = folder / "volumes/policy/remediator.yaml"
        checked = subprocess.run(
            [BIN / "ingero-remediator", "validate", policy],
            capture_output=True, text=True, check=False, env=node.environ("remediator"),
        )  # fmt: skip
        assert checked.returncode == 0, checked.stderr
        page = local_http.get(f"http://127.0.0.1:{node.port(9467)}/metrics").text
        assert "ingero_remediator_audit_waiting" in page
    audit = build_policy(parse_document(policy.read_text())).audit
    assert audit.endpoint == "https://ingero-echo:4318"
    assert Path(audit.ca_file).read_bytes() == secrets["echo-ca"]["ca.crt"]
    assert Path(audit.bearer_file).read_bytes() == secrets["ingero-echo-auth"]["token"]


@pytest.mark.parametrize(
    ("audit", "expected"),
    [
        ({}, ("https://ingero-echo:4318", "/etc/ingero/echo-token/token")),
        ({"interval": "9s"}, ("https://ingero-echo:4318", "/etc/ingero/echo-token/token")),
        ({"endpoint": "https://other:5318"}, ("https://other:5318", "")),
    ],
)
def test_an_audit_of_the_policy_goes_first_and_echos_token_to_nobody_else(audit, expected):
    values = json.loads(json.dumps(CASES["fleet-remediator-audit"][1]))
    values["remediator"]["policy"]["audit"] = audit
    objects = render("ingero-fleet", **values)
    found = read_policy(objects).audit
    assert (found.endpoint, found.bearer_file) == expected
    assert (found.ca_file is None) == (expected[1] == "")
    if "interval" in audit:
        assert found.interval == 9 * NS_PER_S
    assert int(expected[0].rpartition(":")[2]) in find_egress(objects)


def find_egress(objects):
    rules = find(objects, "NetworkPolicy")["spec"]["egress"]
    return {port["port"] for rule in rules for port in rule["ports"]}


def test_the_network_policy_lets_out_what_the_remediator_sends_to_and_no_more():
    assert find_egress(objects_of("fleet-remediator-audit")) == {53, 443, 4318, 8443, 9443}
    link = CASES["fleet-remediator-audit"][1]["remediator"]["policy"]["approval"]["link"]
    bot = {**link, "labels": ["bot"], "send": link["send"][1:]}
    objects = render("ingero-fleet", remediator={
        **CASES["fleet-remediator-audit"][1]["remediator"],
        "policy": {"action": {"command": {"drain": ["true"], "undo": ["true"]}}, "approval": {"link": bot}},
    })  # fmt: skip
    assert find_egress(objects) == {53, 9443}


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("https://ingero-echo:4318/", 4318),
        ("https://ingero-echo:4318", 4318),
        ("https://ingero-echo", 443),
        ("http://ingero-echo/", 80),
        ("https://echo.example/a:1/", 443),
        ("https://[fd00::1]/", 443),
        ("https://[fd00::1]:4318/", 4318),
    ],
)
def test_fleet_is_let_out_to_the_port_of_echo(endpoint, port):
    assert find_egress(render("ingero-fleet", echo={"endpoint": endpoint})) == {53, port}


def read_policy(objects):
    """The policy in the pod, as the program reads it."""
    (config,) = [
        one
        for one in objects
        if one["kind"] == "ConfigMap" and one["metadata"]["name"].endswith("-remediator")
    ]
    return build_policy(parse_document(config["data"]["remediator.yaml"]))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"policy": {}}, "remediator.policy.action is needed"),
        ({"journalClaim": ""}, "remediator.journalClaim is needed"),
        (
            {
                "policy": {
                    "action": {"kubernetes": {}},
                    "approval": {"link": {"base_url": "https://r.example"}},
                }
            },
            "remediator.approvalSecret.name is needed",
        ),
        ({"webhookSecret": {"name": ""}}, "remediator.webhookSecret.name is needed"),
        (
            {"policy": {"action": {"kubernetes": {}}, "journal": {"file": "/tmp/journal.db"}}},
            "remediator.policy.journal.file must be below /var/lib/ingero-remediator",
        ),
        (
            {
                "policy": {
                    "action": {"kubernetes": {}},
                    "brakes": {"stop_file": "/run/ingero/remediator.stop"},
                }
            },
            "remediator.policy.brakes.stop_file must be below /var/lib/ingero-remediator",
        ),
    ],
)
def test_a_remediator_that_could_not_know_what_it_did_is_not_rendered(changed, said):
    given = CASES["fleet-remediator"][1]["remediator"] | changed
    value = f"remediator={json.dumps(given)}"
    fleet = str(DEPLOY / "helm/ingero-fleet")
    status, answer = helm("template", "x", fleet, "--set-json", value)
    assert status != 0
    assert said in answer
    status, answer = helm(
        "template", "x", fleet, "--set", "replicaCount=2", "--set-json",
        f"remediator={json.dumps(CASES['fleet-remediator'][1]['remediator'])}",
    )  # fmt: skip
    assert status != 0
    assert "replicaCount=1" in answer


def test_a_policy_may_have_empty_sections_and_files_of_its_own_in_the_journals_folder():
    policy = {
        "mode": None,
        "action": {"kubernetes": None},
        "brakes": None,
        "approval": None,
        "audit": None,
        "journal": {"file": "/var/lib/ingero-remediator/other.db"},
    }
    objects = render("ingero-fleet", remediator={"enabled": True, "policy": policy})
    found = read_policy(objects)
    assert found.journal.file == "/var/lib/ingero-remediator/other.db"
    assert found.brakes.stop_file == "/var/lib/ingero-remediator/stop"
    assert found.action.kubernetes is not None
    assert find(objects, "ClusterRole")


def test_a_webhooks_key_may_be_a_file_that_something_else_puts_into_the_pod():
    webhook = {"url": "https://remedy.example/ingero", "secret_file": "/vault/secrets/key"}
    policy = {"action": {"webhook": webhook}}
    objects = render("ingero-fleet", remediator={"enabled": True, "policy": policy})
    assert read_policy(objects).action.webhook.secret_file == webhook["secret_file"]
