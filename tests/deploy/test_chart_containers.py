"""The containers of the charts, run as processes by the commands, files and probes that Helm renders."""

import ssl
import subprocess

import httpx
import pytest
import yaml
from tests.deploy.chart_cases import CASES, objects_of
from tests.deploy.chart_probes import is_up, wait_for
from tests.deploy.charts import WORKLOADS, Node, find, find_pod, needs_helm, render
from tests.deploy.site import BIN
from tests.e2e.agents import health
from tests.echo.process import metrics, point
from tests.support import local_http

from ingero.testing.waiting import wait_until

pytestmark = [pytest.mark.slow, needs_helm]


TOKEN = "t" * 32


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
