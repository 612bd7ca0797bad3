"""Devices of Kubernetes: which one a rank has, what is written about it, deleted again, and left alone.

On the small server alone: the real one that can be built is older than device taints.
"""

import json
from contextlib import ExitStack
from dataclasses import replace

import pytest
from tests.deploy.charts import HELM
from tests.remediation.kubernetes.conftest import Api, read_role
from tests.remediation.kubernetes.real_server import READER, REMEDIATOR
from tests.remediation.kubernetes.small_server import run_small_server
from tests.remediation.site import Site, build_config
from tests.remediation.test_slurm import RECORD as SLURM_RECORD
from tests.support.kubernetes_schemas import check_object

from ingero.config.document import parse_document
from ingero.errors import PermanentError, RetryableError
from ingero.model.collectives import Rank
from ingero.model.verdicts import VerdictKind
from ingero.remediation.actuators import kubernetes_device
from ingero.remediation.actuators.kubernetes_api import REASON
from ingero.remediation.actuators.kubernetes_device import KubernetesDeviceActuator
from ingero.remediation.config import build_policy
from ingero.remediation.kubernetes_config import KubernetesDeviceConfig
from ingero.remediation.records import ActionState
from ingero.testing.clock import ManualClock
from ingero.testing.remediation import build_reading, build_verdict
from ingero.units import NS_PER_S
from ingero.wire.process_resource import ResourceKey, join_devices

GPU = "gpu.nvidia.com/n1/gpu-3"
RECORD = replace(SLURM_RECORD, target=GPU, node_id="n1", kind="kubernetes_device")
NAME = f"ingero-{RECORD.action_id}"
RIGHTS = {
    ("list", "resourceslices"), ("list", "devicetaintrules"), ("create", "devicetaintrules"),
    ("delete", "devicetaintrules"),
}  # fmt: skip


@pytest.fixture
def api(tmp_path):
    """A server with four nodes of eight devices, whose remediator has the rights of the chart."""
    with run_small_server() as server, ExitStack() as stack:
        server.rights |= {REMEDIATOR: RIGHTS, READER: {one for one in RIGHTS if one[0] == "list"}}
        for number in range(1, 5):
            server.devices.add_slice(f"n{number}", [f"gpu-{one}" for one in range(8)])
        yield Api(server, tmp_path, stack)


def connect(api, token=REMEDIATOR, clock=None, **config):
    settings = KubernetesDeviceConfig(kubeconfig=api.kubeconfig(token), timeout="20s", **config)
    actuator = KubernetesDeviceActuator(settings, clock or ManualClock())
    api.stack.callback(actuator.close)
    return actuator


def build_rank(*devices, node="n1"):
    """A rank whose container the kubelet gave these devices."""
    return Rank("c", node, 5, resource=((str(ResourceKey.DEVICE_IDS), join_devices(devices)),))


def rules(api):
    return api.server.devices.objects["devicetaintrules"]


class TestWhichDevice:
    @pytest.mark.parametrize(
        ("devices", "node", "target"),
        [
            (["gpu.nvidia.com=n1/gpu-3"], "n1", GPU),
            (["gpu.nvidia.com=n1/gpu-3", "rdma/hca=mlx5_0"], "n1.cluster.site", GPU),
            (["gpu.nvidia.com=n1/gpu-3"], "fleets-name", GPU),
            (["gpu.nvidia.com=n1/gpu-3", "gpu.nvidia.com=n1/gpu-4"], "n1", ""),
            (["nvidia.com/gpu=GPU-8f"], "n1", ""),
            (["gpu.nvidia.com=n1/gpu-9"], "n1", ""),
            (["gpu.nvidia.com=n2/gpu-3"], "n1", ""),
            ([], "n1", ""),
        ],
        ids=[
            "its claim's", "beside a NIC", "renamed", "one of two", "of a device plug-in", "that no driver publishes",
            "of another node", "unknown",
        ],
    )  # fmt: skip
    def test_a_rank_has_the_device_that_its_container_was_given_alone(
        self, api, devices, node, target
    ):
        actuator = connect(api, node_names={"fleets-name": "n1"})
        assert (
            actuator.find_target(build_rank(*devices, node=node), actuator.read_nodes()) == target
        )

    def test_a_pool_may_have_slashes_in_its_name(self, api):
        api.server.devices.add_slice("n9", ["gpu-0"], pool="rack/n9")
        actuator = connect(api)
        rank = build_rank("gpu.nvidia.com=rack/n9/gpu-0", node="n9")
        target = actuator.find_target(rank, actuator.read_nodes())
        assert target == "gpu.nvidia.com/rack/n9/gpu-0"
        actuator.apply(replace(RECORD, target=target))
        assert rules(api)[NAME]["spec"]["deviceSelector"] == {
            "driver": "gpu.nvidia.com", "pool": "rack/n9", "device": "gpu-0",
        }  # fmt: skip

    def test_devices_of_an_older_generation_of_a_pool_are_gone(self, api):
        api.server.devices.add_slice("n1", ["gpu-0"], generation=2)
        assert sorted(one for one in connect(api).read_nodes() if "/n1/" in one) == [
            "gpu.nvidia.com/n1/gpu-0"
        ]

    def test_the_large_list_is_read_again_after_a_minute(self, api):
        clock = ManualClock()
        actuator = connect(api, clock=clock)
        for _ in range(3):
            actuator.read_nodes()
            clock.advance(2 * NS_PER_S)
        assert api.server.devices.n_lists == {"devicetaintrules": 3, "resourceslices": 1}
        api.server.devices.add_slice("n9", ["gpu-0"])
        clock.advance(60 * NS_PER_S)
        assert "gpu.nvidia.com/n9/gpu-0" in actuator.read_nodes()


class TestAction:
    @pytest.mark.parametrize(
        ("served", "schema"), [("v1", "1.37"), ("v1beta2", "1.36"), ("v1alpha3", "1.35")]
    )
    def test_a_rule_taints_one_device_in_the_newest_version_that_is_served(
        self, api, served, schema
    ):
        api.server.devices.served["devicetaintrules"] = {served}
        if served == "v1alpha3":
            api.server.devices.served["resourceslices"] = {"v1beta2"}
        actuator = connect(api, effect="NoExecute")
        actuator.read_nodes()
        actuator.apply(RECORD)
        (rule,) = rules(api).values()
        check_object(rule, schema)
        assert rule["apiVersion"] == f"resource.k8s.io/{served}"
        assert rule["metadata"]["name"] == NAME
        assert rule["metadata"]["annotations"][REASON].startswith(
            f"ingero {RECORD.action_id} {RECORD.episode}: culprit rank 5"
        )
        taint = {"key": "ingero.io/culprit", "value": RECORD.action_id, "effect": "NoExecute"}
        assert rule["spec"]["taint"].items() >= taint.items()
        selector = {"driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-3"}
        assert rule["spec"]["deviceSelector"] == selector
        views = actuator.read_nodes()
        assert [name for name, view in views.items() if not view.in_service] == [GPU]
        assert views[GPU].mark == RECORD.action_id

    def test_asked_again_it_changes_nothing_more(self, api):
        actuator = connect(api)
        actuator.read_nodes()
        actuator.apply(RECORD)
        before = dict(rules(api))
        actuator.apply(RECORD)
        assert rules(api) == before

    def test_the_effect_none_is_a_rule_too(self, api):
        actuator = connect(api, effect="None")
        actuator.read_nodes()
        actuator.apply(RECORD)
        assert rules(api)[NAME]["spec"]["taint"]["effect"] == "None"
        assert actuator.read_nodes()[GPU].mark == RECORD.action_id

    @pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
    def test_a_device_that_its_driver_tainted_is_left_alone(self, api, effect):
        taints = [{"key": "gpu.nvidia.com/xid", "effect": effect}]
        api.server.devices.add_slice("n1", ["gpu-3"], generation=2, taints=taints)
        self.expect_left_alone(api, f"gpu.nvidia.com/xid:{effect}")

    @pytest.mark.parametrize(
        "selector",
        [{}, {"driver": "gpu.nvidia.com"}, {"pool": "n1"}, {"pool": "n1", "device": "gpu-3"}],
    )
    def test_a_device_that_somebody_elses_rule_takes_out_is_left_alone(self, api, selector):
        put_rule(api, selector, "NoSchedule")
        self.expect_left_alone(api, "DeviceTaintRule theirs")

    @pytest.mark.parametrize(
        ("selector", "effect"),
        [({"pool": "n1"}, "None"), ({"pool": "n2"}, "NoExecute"), (None, "NoExecute")],
    )
    def test_a_rule_that_does_nothing_to_it_is_no_obstacle(self, api, selector, effect):
        put_rule(api, selector, effect)
        actuator = connect(api)
        assert actuator.read_nodes()[GPU].in_service
        actuator.apply(RECORD)
        assert NAME in rules(api)

    def expect_left_alone(self, api, why):
        actuator = connect(api)
        view = actuator.read_nodes()[GPU]
        assert (view.in_service, view.mark, view.state) == (False, "", why)
        with pytest.raises(PermanentError, match="out of service already: " + why):
            actuator.apply(RECORD)
        assert NAME not in rules(api)

    def test_a_device_that_went_since_the_last_look_is_refused(self, api):
        actuator = connect(api)
        actuator.read_nodes()
        api.server.devices.add_slice("n1", ["gpu-0"], generation=2)
        with pytest.raises(PermanentError, match=f"there is no device {GPU}"):
            actuator.apply(RECORD)


def put_rule(api, selector, effect):
    spec = {"taint": {"key": "site/bad", "effect": effect}}
    if selector is not None:
        spec["deviceSelector"] = selector
    rule = {
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceTaintRule",
        "metadata": {"name": "theirs"}, "spec": spec,
    }  # fmt: skip
    api.server.devices.answer(
        "POST", "/apis/resource.k8s.io/v1/devicetaintrules", {}, lambda *_: None, rule
    )


class TestUndo:
    def test_it_deletes_the_actions_rule_alone(self, api):
        put_rule(api, {"pool": "n2"}, "NoSchedule")
        actuator = connect(api)
        actuator.read_nodes()
        actuator.apply(RECORD)
        api.server.devices.write_status(NAME, "3 pods would be deleted")
        actuator.reverse(RECORD)
        assert list(rules(api)) == ["theirs"]
        actuator.reverse(RECORD)
        assert actuator.read_nodes()[GPU].in_service

    def test_a_rule_that_a_person_has_changed_is_that_persons(self, api):
        actuator = connect(api, effect="None")
        actuator.read_nodes()
        actuator.apply(RECORD)
        api.server.devices.change_rule(NAME, "NoExecute")
        view = actuator.read_nodes()[GPU]
        assert (view.mark, view.in_service, view.state) == ("", False, f"DeviceTaintRule {NAME}")
        actuator.reverse(RECORD)
        assert rules(api)[NAME]["spec"]["taint"]["effect"] == "NoExecute"

    def test_a_change_between_reading_and_deleting_keeps_the_rule(self, api, monkeypatch):
        actuator = connect(api)
        actuator.read_nodes()
        actuator.apply(RECORD)
        delete = kubernetes_device.delete_unchanged

        def change_first(*what):
            api.server.devices.change_rule(NAME, "NoExecute")
            delete(*what)

        monkeypatch.setattr(kubernetes_device, "delete_unchanged", change_first)
        actuator.reverse(RECORD)
        assert rules(api)[NAME]["metadata"]["generation"] == 2

    def test_a_status_that_changes_meanwhile_does_not_keep_it(self, api, monkeypatch):
        actuator = connect(api)
        actuator.read_nodes()
        actuator.apply(RECORD)
        delete, left = kubernetes_device.delete_unchanged, [2]

        def tell_first(*what):
            if left[0]:
                left[0] -= 1
                api.server.devices.write_status(NAME, f"{left[0]} pods")
            delete(*what)

        monkeypatch.setattr(kubernetes_device, "delete_unchanged", tell_first)
        actuator.reverse(RECORD)
        assert rules(api) == {}


class TestRefusals:
    def test_a_kubernetes_without_device_taints_is_said_at_each_look(self, api):
        api.server.devices.served["devicetaintrules"] = set()
        with pytest.raises(RetryableError, match=r"does not serve DeviceTaintRule: it needs 1\.37"):
            connect(api).read_nodes()

    def test_one_that_learns_them_is_used_from_then_on(self, api):
        actuator = connect(api)
        api.server.devices.served["devicetaintrules"] = set()
        with pytest.raises(RetryableError):
            actuator.read_nodes()
        api.server.devices.served["devicetaintrules"] = {"v1beta2"}
        assert actuator.read_nodes()[GPU].in_service

    def test_a_rehearsal_stores_nothing_and_meets_the_same_refusals(self, api):
        actuator = connect(api)
        actuator.read_nodes()
        actuator.rehearse(RECORD)
        assert rules(api) == {}
        old = connect(api, effect="None")
        api.server.devices.served["devicetaintrules"] = {"v1alpha3"}
        old.read_nodes()
        with pytest.raises(PermanentError, match="Unsupported value"):
            old.rehearse(RECORD)  # Kubernetes 1.33 and 1.34 know no None

    def test_who_may_only_read_is_refused_before_and_when_it_acts(self, api):
        actuator = connect(api, READER)
        actuator.read_nodes()
        for ask in (actuator.rehearse, actuator.apply):
            with pytest.raises(PermanentError, match="cannot create resource"):
                ask(RECORD)
        assert rules(api) == {}

    def test_a_missing_right_is_not_taken_for_a_missing_api(self, api):
        api.server.rights[READER] = {("list", "resourceslices")}
        with pytest.raises(RetryableError, match=r"does not tell DeviceTaintRules: .*cannot list"):
            connect(api, READER).read_nodes()


class TestRemediator:
    def build_site(self, api, tmp_path, **config):
        site = Site(tmp_path / "journal.db", build_config())
        section = {"kubernetes_device": KubernetesDeviceConfig(**config)}
        site.config = site.config.model_copy(
            update={"action": site.config.action.model_copy(update=section | {"slurm": None})}
        )
        site.slurm = connect(api, clock=site.clock, **config)
        site.start()
        return site

    def poll(self, site, *devices, times=6, kind=VerdictKind.CULPRIT):
        result = None
        for number in range(times):
            site.clock.advance(2 * NS_PER_S)
            verdict = build_verdict("n1", kind, n_ops=site.n_ops + number + 1)
            rank = replace(build_rank(*devices), cluster_id=verdict.rank.cluster_id)
            site.fleet.say(replace(verdict, rank=rank))
            result = site.remediator.poll()
        site.n_ops += times
        return result

    def test_the_device_of_a_culprit_is_tainted_and_given_back_when_a_person_asks(
        self, api, tmp_path
    ):
        site = self.build_site(api, tmp_path)
        self.poll(site, "gpu.nvidia.com=n1/gpu-3")
        (record,) = site.journal.actions()
        assert (record.state, record.target) == (ActionState.DONE, GPU)
        assert record.evidence["resource"] == {"ingero.device.ids": "gpu.nvidia.com=n1/gpu-3"}
        site.journal.change(record, replace(record, state=ActionState.UNDOING, is_asked_back=True))
        site.poll(3, [])
        assert site.states() == ["undone"]
        assert rules(api) == {}

    def test_one_who_does_not_know_its_device_is_left_alone_and_the_clause_says_so(
        self, api, tmp_path
    ):
        site = self.build_site(api, tmp_path)
        result = self.poll(site, "gpu.nvidia.com=n1/gpu-3", "gpu.nvidia.com=n1/gpu-4")
        (ruling,) = result.rulings
        assert [(one.clause, one.description) for one in ruling.stops] == [
            (
                "node known",
                "the scheduler has no device for n1, several, or one for two nodes of Fleet's",
            )
        ]
        assert rules(api) == {}

    def test_without_the_api_nothing_is_let_through(self, api, tmp_path):
        api.server.devices.served["devicetaintrules"] = set()
        site = self.build_site(api, tmp_path)
        result = self.poll(site, "gpu.nvidia.com=n1/gpu-3")
        assert "scheduler answers" in {one.clause for one in result.rulings[0].stops}
        assert result.reading.problems[0].startswith("this Kubernetes does not serve")
        assert site.states() == []

    def test_a_rule_that_a_person_changes_ends_the_action(self, api, tmp_path):
        site = self.build_site(api, tmp_path, effect="None")
        self.poll(site, "gpu.nvidia.com=n1/gpu-3")
        api.server.devices.change_rule(next(iter(rules(api))), "NoExecute")
        self.poll(site, "gpu.nvidia.com=n1/gpu-3")
        assert site.states() == ["left"]

    def test_what_the_other_devices_of_the_node_do_gives_none_back(self, api, tmp_path):
        site = self.build_site(api, tmp_path)
        undo = site.config.undo.model_copy(
            update={"when_retracted": True, "retracted_for": 6 * NS_PER_S}
        )
        site.config = site.config.model_copy(update={"undo": undo})
        site.start()
        self.poll(site, "gpu.nvidia.com=n1/gpu-3")
        self.poll(site, "gpu.nvidia.com=n1/gpu-4", kind=VerdictKind.ORDINARY)
        self.poll(site, kind=VerdictKind.ORDINARY)
        assert site.states() == ["done"]
        self.poll(site, "gpu.nvidia.com=n1/gpu-3", kind=VerdictKind.ORDINARY)
        assert (site.states(), rules(api)) == (["undone"], {})

    @pytest.mark.parametrize("others", [("d", "n1"), ("c", "n1.west")], ids=["clusters", "names"])
    @pytest.mark.parametrize("culprit", [3, 7])
    def test_a_device_that_two_nodes_of_fleets_reach_is_left_alone(
        self, api, tmp_path, others, culprit
    ):
        """Each has a rank on every device, as the kubelets of two clusters may both say ``n1/gpu-3``."""
        site = self.build_site(api, tmp_path)
        ranks = [
            (
                cluster,
                replace(build_rank(f"gpu.nvidia.com=n1/gpu-{number}", node=node), rank=number),
            )
            for cluster, node in (("c", "n1"), others)
            for number in range(8)
        ]
        for count in range(1, 7):
            site.clock.advance(2 * NS_PER_S)
            verdicts = {"c": [], "d": []}
            for cluster, rank in ranks:
                is_culprit = (cluster, rank.node_id, rank.rank) == ("c", "n1", culprit)
                kind = VerdictKind.CULPRIT if is_culprit else VerdictKind.ORDINARY
                verdict = build_verdict(rank.node_id, kind, n_ops=count)
                verdicts[cluster].append(replace(verdict, rank=rank))
            site.fleet.clusters = {name: build_reading(*of) for name, of in verdicts.items()}
            result = site.remediator.poll()
        (ruling,) = result.rulings
        assert [one.clause for one in ruling.stops] == ["node known"]
        assert rules(api) == {}

    @pytest.mark.parametrize(
        ("pattern", "is_left"), [("n1", True), ("n1.site", True), ("n2", False)]
    )
    def test_no_device_of_a_node_is_touched_that_is_protected_by_its_name_in_kubernetes(
        self, api, tmp_path, pattern, is_left
    ):
        site = self.build_site(api, tmp_path, node_names={"fleets-name": "n1"})
        brakes = site.config.brakes.model_copy(update={"protected_nodes": (pattern,)})
        site.config = site.config.model_copy(update={"brakes": brakes})
        site.start()
        for count in range(1, 7):
            site.clock.advance(2 * NS_PER_S)
            rank = build_rank("gpu.nvidia.com=n1/gpu-3", node="fleets-name")
            site.fleet.say(replace(build_verdict("fleets-name", n_ops=count), rank=rank))
            result = site.remediator.poll()
        (ruling,) = result.rulings
        is_stopped = "brakes.protected_nodes" in {one.clause for one in ruling.stops}
        assert (is_stopped, rules(api) == {}) == (is_left, is_left)

    def test_what_was_approved_of_one_device_is_not_done_to_another(self, api, tmp_path):
        site = self.build_site(api, tmp_path)
        site.config = site.config.model_copy(update={"mode": "ask"})
        site.start()
        self.poll(site, "gpu.nvidia.com=n1/gpu-3")
        (record,) = site.journal.actions()
        site.journal.change(record, replace(record, state=ActionState.APPROVED))
        self.poll(site, "gpu.nvidia.com=n1/gpu-4")
        assert (site.states(), rules(api)) == (["approved"], {})
        self.poll(site, "gpu.nvidia.com=n1/gpu-3")
        assert site.states() == ["done"]
        (rule,) = rules(api).values()
        assert rule["spec"]["deviceSelector"]["device"] == "gpu-3"


@pytest.mark.skipif(not HELM, reason="no Helm: scripts/install_helm")
def test_the_chart_gives_the_rights_of_these_tests_and_no_others():
    role = read_role({"kubernetes_device": {}})
    rights = {
        (verb, what)
        for rule in role["rules"]
        for what in rule["resources"]
        for verb in rule["verbs"]
    }
    assert rights == RIGHTS
    assert {group for rule in role["rules"] for group in rule["apiGroups"]} == {"resource.k8s.io"}


def test_a_policy_with_a_device_is_valid(tmp_path):
    policy = build_policy(parse_document(json.dumps({"action": {"kubernetes_device": {}}})))
    assert policy.action.kubernetes_device.effect == "NoSchedule"
