"""What the chart gives the agent's pod of its node, and what the pod puts there."""

import re
import subprocess
from pathlib import Path

import pytest
from tests.deploy.charts import Node, find, find_pod, needs_helm, render
from tests.deploy.series import read_dashboard

from ingero.agent.capture.discover.pod_resources import CONTAINER_LOGS
from ingero.agent.capture.kernel.map_memory import reckon_all
from ingero.agent.capture.probes.host import PROBES
from ingero.agent.collectives.plugin import NAME, find_plugin
from ingero.config.environment import DEFAULT_KUBELET_SOCKET
from ingero.otlp.client.endpoint import parse_endpoint

pytestmark = [pytest.mark.slow, needs_helm]


def test_the_first_container_copies_the_plug_in_to_the_folder_of_the_node(tmp_path):
    objects = render("ingero", ncclPlugin={"hostPath": "/opt/ingero"})
    node = Node(tmp_path, objects)
    done = subprocess.run(
        node.command("nccl-plugin"),
        env=node.environ("nccl-plugin"),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "volumes/nccl-plugin" / NAME).read_bytes() == find_plugin().read_bytes()
    (volume,) = [one for one in node.pod["volumes"] if one["name"] == "nccl-plugin"]
    assert volume["hostPath"] == {"path": "/opt/ingero", "type": "DirectoryOrCreate"}
    rights = node.container("nccl-plugin")["securityContext"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize(
    "values", [{}, {"ncclPlugin": None}], ids=["default", "an older release's"]
)
def test_unless_a_folder_is_named_nothing_is_copied_to_the_node(values):
    pod = find(render("ingero", **values), "DaemonSet")["spec"]["template"]["spec"]
    assert "initContainers" not in pod
    assert "nccl-plugin" not in {volume["name"] for volume in pod["volumes"]}


def test_the_agent_has_the_hosts_cgroups_to_read_and_not_to_write():
    pod = find_pod(render("ingero"))["spec"]
    (volume,) = [
        one for one in pod["volumes"] if one.get("hostPath", {}).get("path") == "/sys/fs/cgroup"
    ]
    (mount,) = [
        one for one in pod["containers"][0]["volumeMounts"] if one["name"] == volume["name"]
    ]
    assert mount["readOnly"] is True
    assert mount["mountPath"] != "/sys/fs/cgroup"  # the container's own, which its runtime mounts


def test_the_agents_memory_limit_holds_full_maps_of_a_large_machine_and_the_process_twice_over():
    limit = find_pod(render("ingero"))["spec"]["containers"][0]["resources"]["limits"]["memory"]
    probes = "calls", *(probe.name for probe in PROBES)
    maps = sum(cost.max_bytes for cost in reckon_all(probes, n_cpus=256).values())
    resident = 236 << 20  # measured: see values.yaml
    assert limit == "1Gi"
    assert 2 * (maps + resident) <= (1 << 30)


def test_the_agent_sees_the_kubelets_socket_unless_it_is_not_to_ask():
    def mounts(**values):
        (container,) = find_pod(render("ingero", **values))["spec"]["containers"]
        return {mount["mountPath"] for mount in container["volumeMounts"]}

    asked = {str(Path(DEFAULT_KUBELET_SOCKET).parent), str(CONTAINER_LOGS)}
    assert asked <= mounts()
    assert not asked & mounts(kubelet={"ask": False})


@pytest.mark.parametrize("mode", ["trace", "fleet-push"])
def test_in_either_mode_the_agent_has_the_token_and_certificates_that_are_named(mode):
    push = {
        "endpoint": "https://f:4318",
        "clusterID": "c",
        "tokenSecret": {"name": "push", "key": "bearer"},
        "tls": {"secretName": "certificates", "caKey": "root.pem"},
    }
    pod = find_pod(render("ingero", mode=mode, fleetPush=push))["spec"]
    (agent,) = pod["containers"]
    options = dict(word.split("=", 1) for word in agent["args"] if "=" in word)
    places = {mount["mountPath"]: mount["name"] for mount in agent["volumeMounts"]}
    secrets = {
        one["name"]: one["secret"]["secretName"] for one in pod["volumes"] if "secret" in one
    }
    given = {
        "--fleet-bearer-token-file": ("push", "bearer"),
        "--fleet-tls-ca": ("certificates", "root.pem"),
        "--fleet-tls-cert": ("certificates", "tls.crt"),
        "--fleet-tls-key": ("certificates", "tls.key"),
    }
    for name, (secret, key) in given.items():
        file = Path(options[name])
        assert file.name == key
        assert secrets[places[str(file.parent)]] == secret


@pytest.mark.parametrize("mode", ["trace", "fleet-push"])
def test_the_agent_needs_no_client_certificate_for_a_fleet_that_asks_for_none(mode):
    tls = {"secretName": "authority", "certKey": "", "keyKey": ""}
    push = {"endpoint": "https://f:4318", "clusterID": "c", "tls": tls}
    (agent,) = find_pod(render("ingero", mode=mode, fleetPush=push))["spec"]["containers"]
    given = [word for word in agent["args"] if word.startswith("--fleet-tls-")]
    assert given == ["--fleet-tls-ca=/etc/ingero/fleet-tls/ca.crt"]


@pytest.mark.parametrize(
    ("mode", "has_sink", "jobs"),
    [
        ("trace", False, {"metrics": "ingero-trace"}),
        ("fleet-push", False, {"metrics": "ingero-agent"}),
        ("fleet-push", True, {"metrics": "ingero-agent", "sink": "ingero-sink"}),
    ],
)
def test_prometheus_scrapes_the_agents_pod_by_the_names_that_the_dashboards_ask_for(
    mode, has_sink, jobs
):
    push = {"endpoint": "f:4318", "clusterID": "c", "remediation": {"sinkEnabled": has_sink}}
    objects = render("ingero", mode=mode, fleetPush=push, podMonitor={"enabled": True})
    found = {
        end["port"]: {one["targetLabel"]: one["replacement"] for one in end["relabelings"]}
        for end in find(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    }
    assert found == {port: {"job": job} for port, job in jobs.items()}
    (variable,) = [
        one
        for one in read_dashboard("ingero-agent")["templating"]["list"]
        if one["name"] == "instance"
    ]
    (asked,) = re.findall(r'job=~"([^"]+)"', variable["query"]["query"])
    assert all(re.fullmatch(asked, job) for job in jobs.values())


@pytest.mark.parametrize(
    ("mode", "push", "ports"),
    [
        ("trace", {}, [4317, 4318, 8080]),
        ("fleet-push", {"endpoint": "fleet:4318"}, [4317, 4318, 8080]),
        ("fleet-push", {"endpoint": "https://fleet.example"}, [4317, 4318, 8080, 443]),
        ("fleet-push", {"endpoint": "https://fleet.example/a:1"}, [4317, 4318, 8080, 443]),
        ("fleet-push", {"endpoint": "fleet"}, [4317, 4318, 8080, 80]),
        ("fleet-push", {"endpoint": "fleet", "insecure": False}, [4317, 4318, 8080, 443]),
        ("fleet-push", {"endpoint": "fleet", "tls": {"secretName": "t"}}, [4317, 4318, 8080, 443]),
        ("fleet-push", {"endpoint": "fleet:5318", "thresholdUrl": None}, [4317, 4318, 8080, 5318]),
        ("fleet-push", {"endpoint": "f-0:5318, [fd00::1]:6318"}, [4317, 4318, 8080, 5318, 6318]),
        (
            "fleet-push",
            {"endpoint": "fleet:4318", "thresholdUrl": "http://fleet:9080/"},
            [4317, 4318, 8080, 9080],
        ),
    ],
)
def test_the_agent_is_let_out_to_the_ports_of_its_fleet(mode, push, ports):
    objects = render("ingero", mode=mode, fleetPush={"clusterID": "c", **push})
    egress = find(objects, "NetworkPolicy")["spec"]["egress"]
    assert [one["port"] for rule in egress for one in rule["ports"]] == [53, 53, *ports]
    if mode == "fleet-push":
        is_insecure = push.get("insecure", True) and "tls" not in push
        addresses = f"{push['endpoint']},{push.get('thresholdUrl') or ''}".split(",")
        asked = {
            parse_endpoint(one, is_insecure=is_insecure, option="").target.rpartition(":")[2]
            for one in addresses
            if one
        }
        assert {int(port) for port in asked} <= set(ports)


def test_an_agent_that_may_push_nowhere_may_still_ask_for_names():
    objects = render("ingero", networkPolicy={"fleetPorts": []})
    (rule,) = find(objects, "NetworkPolicy")["spec"]["egress"]
    assert {one["port"] for one in rule["ports"]} == {53}


@pytest.mark.parametrize("mode", ["trace", "fleet-push"])
def test_an_agent_whose_ports_are_null_may_push_anywhere(mode):
    push = {"clusterID": "c", "endpoint": "fleet:4318"}
    objects = render("ingero", mode=mode, fleetPush=push, networkPolicy={"fleetPorts": None})
    (_, anywhere) = find(objects, "NetworkPolicy")["spec"]["egress"]
    assert anywhere == {}
