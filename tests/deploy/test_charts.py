"""The Helm charts, rendered by a real Helm: valid for Kubernetes, consistent, and their containers really start."""

import pytest
import yaml
from tests.deploy.chart_cases import CASES, objects_of
from tests.deploy.charts import CHARTS, find, find_claims, find_pod, helm, needs_helm, render
from tests.deploy.site import DEPLOY
from tests.support.kubernetes_schemas import check_object

pytestmark = [pytest.mark.slow, needs_helm]


OLDEST, NEWEST = "1.25", "1.37"
"""Of those whose schemas there are; the charts ask for 1.20, on which `make test-kubernetes-guide` installs them."""


BUDGETS = [("1.20.2", "policy/v1beta1"), ("1.37.0", "policy/v1")]
CUSTOM = {"ServiceMonitor", "PodMonitor"}


every_case = pytest.mark.parametrize("case", sorted(CASES))


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
