"""The Helm charts, rendered by a real Helm: valid for Kubernetes, consistent, and their containers really start."""

import ssl
import subprocess

import httpx
import pytest
import yaml
from tests.deploy.charts import (
    CHARTS,
    WORKLOADS,
    Node,
    find,
    find_claims,
    find_pod,
    helm,
    needs_helm,
    render,
)
from tests.deploy.site import BIN, DEPLOY
from tests.e2e.agents import health
from tests.echo.process import metrics, point
from tests.support import local_http
from tests.support.kubernetes_schemas import check_object

from ingero.testing.waiting import wait_until

pytestmark = [pytest.mark.slow, needs_helm]
OLDEST, NEWEST = "1.25", "1.37"
"""Of those whose schemas there are; the charts ask for 1.20, on which `make test-kubernetes-guide` installs them."""
BUDGETS = [("1.20.2", "policy/v1beta1"), ("1.37.0", "policy/v1")]
CUSTOM = {"ServiceMonitor", "PodMonitor"}
SWITCHES = {
    "ingress": {"enabled": True, "host": "x.example", "className": "nginx"},
    "podDisruptionBudget": {"enabled": True},
    "serviceMonitor": {"enabled": True},
}
TOKEN = "t" * 32
CASES = {
    "fleet": ("ingero-fleet", {}),
    "fleet-all": (
        "ingero-fleet",
        {
            **SWITCHES,
            "replicaCount": 2,
            "tls": {"secretName": "fleet-tls", "clientCa": True},
            "auth": {"secretName": "fleet-auth"},
            "echo": {"endpoint": "https://ingero-echo:4318", "caSecret": {"name": "echo-ca"}},
            "config": {
                "rates": {"currency": "USD"},
                "overrides": {"processors": {"nccl": {"patience": "2m"}}},
            },
            "networkPolicy": {"agents": [{"podSelector": {}}], "monitoring": [{"podSelector": {}}]},
            "nodeSelector": {"a": "b"},
        },
    ),
    "fleet-remediator": (
        "ingero-fleet",
        {
            "remediator": {
                "enabled": True,
                "policy": {
                    "mode": "ask",
                    "action": {"webhook": {"url": "https://remedy.example:8443/ingero"}},
                },
                "webhookSecret": {"name": "webhook"},
                "journalClaim": "journal",
            }
        },
    ),
    "fleet-remediator-kubernetes": (
        "ingero-fleet",
        {
            "remediator": {
                "enabled": True,
                "policy": {"mode": "auto", "action": {"kubernetes": {"cordon": True}}},
                "journalClaim": "journal",
            }
        },
    ),
    "fleet-remediator-device": (
        "ingero-fleet",
        {
            "remediator": {
                "enabled": True,
                "policy": {"action": {"kubernetes_device": {"effect": "None"}}},
            }
        },
    ),
    "fleet-remediator-link": (
        "ingero-fleet",
        {
            "remediator": {
                "enabled": True,
                "policy": {
                    "mode": "ask",
                    "action": {"kubernetes": {}},
                    "approval": {"link": {"base_url": "https://remedy.example"}},
                },
                "approvalSecret": {"name": "approval"},
                "journalClaim": "journal",
            },
            "networkPolicy": {"approval": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]},
        },
    ),
    "fleet-remediator-audit": (
        "ingero-fleet",
        {
            "echo": {"endpoint": "https://ingero-echo:4318/", "caSecret": {"name": "echo-ca"}},
            "remediator": {
                "enabled": True,
                "policy": {
                    "mode": "ask",
                    "action": {"webhook": {"url": "https://[fd00::1]:8443/a:1"}},
                    "approval": {
                        "link": {
                            "base_url": "https://remedy.example",
                            "labels": ["ana", "bot"],
                            "send": [
                                {
                                    "label": "ana",
                                    "slack": {"webhook_url_file": "/etc/ingero/approval/slack"},
                                },
                                {
                                    "label": "bot",
                                    "webhook": {
                                        "url": "https://bot.example:9443/ingero",
                                        "secret_file": "/etc/ingero/approval/bot",
                                    },
                                },
                            ],
                        }
                    },
                },
                "approvalSecret": {"name": "approval"},
                "webhookSecret": {"name": "webhook"},
                "journalClaim": "journal",
            },
        },
    ),
    "fleet-remediator-nvsentinel": (
        "ingero-fleet",
        {"remediator": {"enabled": True, "policy": {"action": {"nvsentinel": {}}}}},
    ),
    "echo": ("ingero-echo", {"persistence": {"storageClass": "encrypted"}}),
    "echo-all": (
        "ingero-echo",
        {
            **SWITCHES,
            "persistence": {"encryptionAcknowledged": True, "size": "5Gi"},
            "tls": {"secretName": "echo-tls"},
            "auth": {"aclKey": "bearers.yaml"},
            "backups": {"existingClaim": "echo-backups"},
            "config": {"retention": "168h", "backup_keep": 3},
        },
    ),
    "agent": ("ingero", {}),
    "agent-configured": (
        "ingero",
        {
            "config": {"agent": {"node": "ignored"}, "trace": {"prometheus": "", "stack": True}},
            "kubelet": {"ask": False},
            "ncclPlugin": {"hostPath": "/opt/ingero"},
            "podAnnotations": {"a": "b"},
        },
    ),
    "agent-capabilities": ("ingero", {"privileged": False, "namespace": {"create": True}}),
    "agent-push": (
        "ingero",
        {
            "mode": "fleet-push",
            "podMonitor": {"enabled": True},
            "fleetPush": {
                "endpoint": "fleet:4318",
                "clusterID": "prod",
                "stub": True,
                "thresholdUrl": "http://fleet:8080",
                "tokenSecret": {"name": "push"},
                "remediation": {"sinkEnabled": True},
            },
        },
    ),
    "agent-trace-tls": (
        "ingero",
        {"fleetPush": {"tls": {"secretName": "agent-tls"}, "tokenSecret": {"name": "push"}}},
    ),
    "agent-tls": (
        "ingero",
        {
            "mode": "fleet-push",
            "fleetPush": {
                "endpoint": "https://f:4318",
                "clusterID": "c",
                "tls": {"secretName": "t"},
            },
        },
    ),
}
every_case = pytest.mark.parametrize("case", sorted(CASES))


def objects_of(case):
    chart, values = CASES[case]
    return render(chart, **values)


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        ("fleet-remediator", {"type": "Recreate"}),  # with a claim for the journal
        ("fleet-remediator-device", None),  # without one, in dry-run
        ("fleet-all", None),
    ],
)
def test_fleets_pod_ends_before_the_next_one_where_both_would_need_the_journals_claim(
    case, strategy
):
    assert find(objects_of(case), "Deployment")["spec"].get("strategy") == strategy


@pytest.mark.parametrize("chart", CHARTS)
def test_helm_finds_nothing_wrong_with_a_chart(chart):
    more = ["--set", "persistence.storageClass=x"] if chart == "ingero-echo" else []
    status, said = helm("lint", "--strict", str(DEPLOY / "helm" / chart), *more)
    assert status == 0, said
    assert "WARNING" not in said


@pytest.mark.parametrize(
    ("case", "version"),
    [
        *((case, NEWEST) for case in sorted(CASES)),
        *((case, OLDEST) for case in ("fleet-all", "echo-all", "agent")),
    ],
)
def test_each_object_is_one_that_kubernetes_knows(case, version):
    for one in objects_of(case):
        if one["kind"] not in CUSTOM:
            check_object(one, version)


@every_case
def test_what_refers_to_another_object_finds_it(case):
    objects = objects_of(case)
    pod = find_pod(objects)
    labels = pod["metadata"]["labels"]
    ports = {port["name"] for one in pod["spec"]["containers"] for port in one.get("ports", ())}
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    service_ports = set()
    for one in objects:
        spec = one.get("spec", {})
        chosen = {
            "Service": spec.get("selector"),
            "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels"),
        }
        matched = chosen.get(one["kind"]) or (spec.get("selector") or {}).get("matchLabels")
        if matched:
            assert matched.items() <= labels.items(), one["kind"]
        if one["kind"] == "Service":
            assert {port["targetPort"] for port in spec["ports"]} <= ports
            service_ports = {port["name"] for port in spec["ports"]}
        if one["kind"] == "NetworkPolicy":
            assert spec["policyTypes"] == ["Ingress", "Egress"]
            opened = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
            assert opened == ports - {"health"}
    for one in objects:
        if one["kind"] == "Ingress":
            backend = one["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
            assert ("Service", backend["name"]) in names
            assert backend["port"]["name"] in service_ports
        if one["kind"] in CUSTOM:
            asked = one["spec"].get("endpoints") or one["spec"]["podMetricsEndpoints"]
            assert {end["port"] for end in asked} <= (service_ports or ports)
    assert ("ServiceAccount", pod["spec"]["serviceAccountName"]) in names
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]} | set(find_claims(objects))
    for container in pod["spec"]["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


@every_case
def test_no_container_has_more_rights_than_it_needs(case):
    pod = find_pod(objects_of(case))["spec"]
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        rights = container["securityContext"]
        assert rights["readOnlyRootFilesystem"] is True
        assert container["resources"]["limits"]["memory"]
        if container["name"] == "agent":
            assert case == "agent-push" or rights.get("privileged") == (
                case != "agent-capabilities" or None
            )
            continue
        assert rights["allowPrivilegeEscalation"] is False
        assert rights["capabilities"] == {"drop": ["ALL"]}
        needs_root = (case, container["name"]) == ("fleet-remediator-nvsentinel", "remediator")
        assert {**pod["securityContext"], **rights}["runAsNonRoot"] is not needs_root


@every_case
def test_a_container_that_listens_is_probed(case):
    for container in find_pod(objects_of(case))["spec"]["containers"]:
        ports = {port["name"] for port in container["ports"]}
        kinds = {"livenessProbe", "readinessProbe", "startupProbe"} & set(container)
        assert "livenessProbe" in kinds
        assert {container[kind]["httpGet"]["port"] for kind in kinds} <= ports


def test_echo_is_not_rendered_before_somebody_answers_for_its_disk():
    chart = str(DEPLOY / "helm/ingero-echo")
    status, said = helm("template", "e", chart)
    assert status != 0
    assert "persistence.storageClass" in said
    assert "persistence.encryptionAcknowledged=true" in said
    for answer in ("persistence.storageClass=gp3", "persistence.encryptionAcknowledged=true"):
        assert helm("template", "e", chart, "--set", answer)[0] == 0


@pytest.mark.parametrize(
    ("chart", "value", "said"),
    [
        ("ingero-fleet", "replicaCount=0", "replicaCount"),
        ("ingero-fleet", "replicas=2", "replicas"),
        ("ingero-fleet", "config.push_interval=soon", "push_interval"),
        ("ingero-echo", "persistence.size=much", "size"),
        ("ingero", "mode=both", "mode"),
        ("ingero", "mode=fleet-push", "fleetPush.endpoint is needed"),
        ("ingero", "fleetPush.clusterId=x", "clusterId"),
    ],
)
def test_a_wrong_value_is_named(chart, value, said):
    more = ["--set", "persistence.storageClass=x"] if chart == "ingero-echo" else []
    status, answer = helm("template", "x", str(DEPLOY / "helm" / chart), "--set", value, *more)
    assert status != 0
    assert said in answer


@pytest.mark.parametrize(("version", "api"), BUDGETS)
@pytest.mark.parametrize("chart", ["ingero-echo", "ingero-fleet"])
def test_a_disruption_budget_is_of_the_version_that_the_cluster_has(chart, version, api):
    more = ["--set", "persistence.storageClass=x"] if chart == "ingero-echo" else []
    status, text = helm(
        "template", "x", str(DEPLOY / "helm" / chart), "--kube-version", version,
        "--set", "podDisruptionBudget.enabled=true", *more,
    )  # fmt: skip
    assert status == 0, text
    objects = [one for one in yaml.safe_load_all(text) if one]
    assert find(objects, "PodDisruptionBudget")["apiVersion"] == api


@every_case
def test_each_port_names_its_protocol_which_is_part_of_its_key_when_a_server_applies(case):
    objects = objects_of(case)
    ports = [port for one in find_pod(objects)["spec"]["containers"] for port in one["ports"]]
    ports += [port for one in objects if one["kind"] == "Service" for port in one["spec"]["ports"]]
    assert {port.get("protocol") for port in ports} == {"TCP"}


def test_rows_stay_when_echo_is_upgraded_or_its_release_is_removed():
    before = find(render("ingero-echo", persistence={"storageClass": "e"}), "StatefulSet")
    after = find(
        render("ingero-echo", persistence={"storageClass": "e"}, image={"tag": "9.9.9"}),
        "StatefulSet",
    )
    # Kubernetes refuses a StatefulSet whose other fields change, and Helm would have to delete it.
    fixed = ("serviceName", "selector", "volumeClaimTemplates")
    assert {key: before["spec"][key] for key in fixed} == {key: after["spec"][key] for key in fixed}
    assert (
        "persistentVolumeClaimRetentionPolicy" not in before["spec"]
    )  # Retain is what there is without it
    assert before["spec"]["replicas"] == 1
    kept = find(render("ingero-echo", persistence={"storageClass": "e"}), "Secret")
    assert kept["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def is_up(url):
    def ask():
        try:
            return local_http.get(url, timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    return ask


def wait_for(node, name, process, log, kind="startupProbe"):
    """Until the kubelet would be content."""
    url = node.probe(name, kind)

    def ready():
        assert process.poll() is None, log.read_text()
        return is_up(url)()

    wait_until(ready, 60)


def issue(authority, name):
    made = authority.issue_cert(name, "localhost")
    return {
        "tls.crt": made.cert_chain_pems[0].bytes(),
        "tls.key": made.private_key_pem.bytes(),
        "ca.crt": authority.cert_pem.bytes(),
    }


def test_fleets_container_starts_with_the_default_values_and_takes_a_push(folder):
    node = Node(folder, objects_of("fleet"))
    with node.start("fleet") as (process, log):
        wait_for(node, "fleet", process, log)
        assert is_up(node.probe("fleet", "readinessProbe"))()
        url = f"http://127.0.0.1:{node.port(4318)}/v1/metrics"
        assert local_http.post(url, json=health("n1", cluster="c")).status_code == 200
        text = local_http.get(f"http://127.0.0.1:{node.port(8888)}/metrics").text
        assert 'ingero_fleet_active_nodes{cluster_id="c"} 1' in text
        assert (
            "ingero_node_health_score_ratio"
            in local_http.get(f"http://127.0.0.1:{node.port(9090)}/metrics").text
        )


def test_fleet_with_tls_and_bearers_takes_pushes_of_those_who_have_both(folder, authority):
    secrets = {
        "fleet-tls": issue(authority, "fleet"),
        "fleet-auth": {"tokens": f"{TOKEN}\n".encode()},
        "echo-ca": {"ca.crt": authority.cert_pem.bytes()},
        "ingero-echo-auth": {"token": b"e" * 32},
    }
    node = Node(folder, objects_of("fleet-all"), secrets)
    client = authority.issue_cert("agent")
    context = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    bare = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
    client.configure_cert(context)
    with node.start("fleet") as (process, log):
        wait_for(node, "fleet", process, log)
        url = f"https://localhost:{node.port(4318)}/v1/metrics"
        bearer = {"authorization": f"Bearer {TOKEN}"}
        body = health("n1", cluster="c")
        assert local_http.post(url, json=body, verify=context, headers=bearer).status_code == 200
        assert local_http.post(url, json=body, verify=context).status_code == 401
        with pytest.raises(httpx.TransportError):
            local_http.post(url, json=body, verify=bare, headers=bearer)
        process.kill()  # asked to end, it would try half a minute long to reach an Echo that is not there


def test_echo_makes_backups_on_the_volume_that_is_named_for_them():
    pod = find_pod(objects_of("echo-all"))
    (volume,) = (one for one in pod["spec"]["volumes"] if one["name"] == "backups")
    assert volume["persistentVolumeClaim"] == {"claimName": "echo-backups"}
    (mount,) = (
        one for one in pod["spec"]["containers"][0]["volumeMounts"] if one["name"] == "backups"
    )
    config = yaml.safe_load(find(objects_of("echo-all"), "ConfigMap")["data"]["echo.yaml"])
    assert (config["backup_dir"], config["backup_keep"]) == (mount["mountPath"], 3)
    assert all(one["name"] != "backups" for one in find_pod(objects_of("echo"))["spec"]["volumes"])


def test_echos_container_keeps_rows_over_an_upgrade_with_the_certificate_of_the_chart(folder):
    values = {"persistence": {"storageClass": "e"}, "config": {"min_free_space": "1MiB"}}
    secrets = {"ingero-echo-auth": {"token": TOKEN.encode()}}
    node = Node(folder, render("ingero-echo", **values), secrets)
    authority = node.secret("site-ingero-echo-tls")["ca.crt"].decode()
    context = ssl.create_default_context(cadata=authority)
    bearer = {"authorization": f"Bearer {TOKEN}"}

    def ask(where, path, **more):
        url = f"https://localhost:{where.port(8081)}{path}"
        return local_http.post(url, headers=bearer, verify=context, timeout=30, **more)

    with node.start("echo") as (process, log):
        wait_for(node, "echo", process, log)
        wait_until(is_up(node.probe("echo", "readinessProbe")), 60)
        body = metrics([point(0.5)], name="ingero.node.health_score", cluster="c", node="n1")
        sent = local_http.post(
            f"https://localhost:{node.port(4318)}/v1/metrics",
            json=body,
            headers=bearer,
            verify=context,
        )
        assert sent.status_code == 200, sent.text
    assert process.returncode == 0
    upgraded = Node(folder, render("ingero-echo", **values, image={"tag": "9.9.9"}), {
        **secrets, "site-ingero-echo-tls": node.secret("site-ingero-echo-tls"),
    })  # fmt: skip
    with upgraded.start("echo") as (process, log):
        wait_for(upgraded, "echo", process, log)
        answer = ask(
            upgraded,
            "/api/v2/sql",
            json={"sql": "SELECT count(*) AS n FROM events", "time_window": "1h"},
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["rows"][0][0] == 1
        scraped = local_http.get(
            f"https://localhost:{upgraded.port(8081)}/metrics", headers=bearer, verify=context
        )
        assert "ingero_echo_store_up 1" in scraped.text


def test_echo_with_a_file_of_bearers_starts(folder, authority):
    bearers = f"- {{key_name: o, token: {TOKEN}, allowed_clusters: ['*']}}\n"
    secrets = {
        "echo-tls": issue(authority, "echo"),
        "ingero-echo-auth": {"bearers.yaml": bearers.encode()},
    }
    node = Node(folder, objects_of("echo-all"), secrets)
    with node.start("echo") as (process, log):
        wait_for(node, "echo", process, log)


def test_the_agents_container_and_its_sidecar_start_and_are_probed(folder):
    node = Node(folder, objects_of("agent-push"), {"push": {"token": TOKEN.encode()}})
    with node.start("agent") as (process, log), node.start("sink") as (sink, sink_log):
        wait_for(node, "agent", process, log)
        wait_for(node, "sink", sink, sink_log, "livenessProbe")
        wait_until(is_up(node.probe("sink", "readinessProbe")), 60)
        page = f"http://127.0.0.1:{node.port(9465)}/metrics"
        wait_until(lambda: "ingero_agent_fleet_reachable" in local_http.get(page).text, 60)


@pytest.mark.kernel
def test_the_container_of_a_trace_starts_and_is_probed(folder):
    node = Node(folder, objects_of("agent"))
    assert "--node=node-1" in node.command("agent")
    with node.start("agent") as (process, log):
        wait_for(node, "agent", process, log)
    assert (folder / "volumes/data/ingero.db").exists()


@pytest.mark.kernel
def test_a_trace_pushes_to_a_fleet_that_wants_a_certificate_and_a_bearer(tmp_path, authority):
    secrets = {
        "fleet-tls": issue(authority, "fleet"),
        "fleet-auth": {"tokens": f"{TOKEN}\n".encode()},
        "echo-ca": {"ca.crt": authority.cert_pem.bytes()},
        "ingero-echo-auth": {"token": b"e" * 32},
        "agent-tls": issue(authority, "agent"),
        "push": {"token": TOKEN.encode()},
    }
    fleet = Node(tmp_path / "fleet", objects_of("fleet-all"), secrets)
    address = f"https://localhost:{fleet.port(4318)}"
    chart, values = CASES["agent-trace-tls"]
    values = {**values, "trace": {"extraArgs": ["--fleet", address, "--fleet-cluster-id", "c"]}}
    agent = Node(tmp_path / "agent", render(chart, **values), secrets)
    with fleet.start("fleet") as (process, log), agent.start("agent") as (traced, traced_log):
        wait_for(fleet, "fleet", process, log)
        wait_for(agent, "agent", traced, traced_log)
        page = f"http://127.0.0.1:{fleet.port(8888)}/metrics"
        wait_until(lambda: 'nodes{cluster_id="c"} 1' in local_http.get(page).text, 60)
        process.kill()  # as above


def test_the_agents_settings_file_is_one_that_it_takes_and_a_change_of_it_changes_the_pod(folder):
    node = Node(folder, objects_of("agent-configured"))
    file = folder / "volumes/config/ingero.yaml"
    assert f"--config={file}" in node.command("agent")
    done = subprocess.run(
        [BIN / "ingero", "config", "validate", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    file.chmod(0o600)
    file.write_text(file.read_text().replace("stack:", "stakc:"))
    bad = subprocess.run([*node.command("agent")], capture_output=True, text=True, check=False)
    assert bad.returncode == 2
    assert "did you mean stack" in bad.stderr
    pods = [find_pod(render("ingero", config={"trace": {"stack": on}})) for on in (True, False)]
    one, other = (pod["metadata"]["annotations"]["ingero/config"] for pod in pods)
    assert one != other


def test_every_workload_runs_a_program_of_ours():
    for case in CASES:
        workloads = [one for one in objects_of(case) if one["kind"] in WORKLOADS]
        assert len(workloads) == 1
