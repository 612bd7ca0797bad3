"""Nodes of Kubernetes: what is tainted, cordoned and said there, given back, and left alone."""

from dataclasses import replace

import pytest
from tests.remediation.kubernetes.conftest import build_node
from tests.remediation.kubernetes.real_server import READER
from tests.remediation.site import Site, build_config
from tests.remediation.test_slurm import RECORD as SLURM_RECORD

from ingero.errors import PermanentError, RetryableError
from ingero.model.collectives import Rank
from ingero.remediation.actuators.kubernetes import EFFECTS, REASON
from ingero.remediation.records import ActionState
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S

RECORD = replace(SLURM_RECORD, target="n1", node_id="n1", kind="kubernetes")
OTHER = replace(RECORD, action_id="aeeeeeeeeee")
OURS = {"key": "ingero.io/culprit", "value": RECORD.action_id, "effect": "NoSchedule"}
THEIRS = {"key": "site/reserved", "value": "x", "effect": "NoSchedule"}


def conditions(node):
    return {one["type"]: (one["status"], one["message"]) for one in node["status"]["conditions"]}


def without_traces(node):
    """A node without what each change of it leaves, and without the condition that says that it is over."""
    meta = {
        key: value
        for key, value in node["metadata"].items()
        if key not in {"resourceVersion", "managedFields", "annotations"}
    }
    kept = [one for one in node["status"]["conditions"] if one["type"] != "IngeroCulprit"]
    notes = node["metadata"].get("annotations") or {}
    return meta, notes, node.get("spec") or {}, kept


class TestLook:
    def test_a_node_that_takes_pods_is_in_service(self, api):
        nodes = api.actuator().read_nodes()
        assert sorted(nodes) == ["n1", "n2", "n3", "n4"]
        assert all(view.in_service and not view.mark for view in nodes.values())

    @pytest.mark.parametrize(
        ("changed", "state"),
        [
            ({"unschedulable": True}, "SchedulingDisabled"),
            ({"ready": "False"}, "NotReady"),
            ({"ready": "Unknown"}, "NotReady"),
            (
                {"taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]},
                "node.kubernetes.io/out-of-service",
            ),
            (
                {"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]},
                "karpenter.sh/disrupted",
            ),
        ],
    )
    def test_a_node_that_others_took_out_is_not(self, api, changed, state):
        api.server.create(build_node("n9", **changed))
        actuator = api.actuator()
        view = actuator.read_nodes()["n9"]
        assert (view.in_service, view.mark) == (False, "")
        assert state in view.state
        before = api.node("n9")
        with pytest.raises(PermanentError, match=r"n9 is out of service already: .*" + state):
            actuator.apply(replace(RECORD, target="n9"))
        assert api.node("n9") == before

    def test_a_taint_that_only_reserves_a_node_does_not_take_it_out(self, api):
        gpu = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
        pressed = {"key": "node.kubernetes.io/disk-pressure", "effect": "PreferNoSchedule"}
        api.server.create(build_node("n9", taints=[gpu, pressed]))
        assert api.actuator().read_nodes()["n9"].in_service

    def test_only_nodes_with_the_policys_labels_are_looked_at(self, api):
        node = build_node("n9")
        node["metadata"]["labels"]["pool"] = "other"
        api.server.create(node)
        assert "n9" not in api.actuator(selector={"pool": "gpu"}).read_nodes()
        assert list(api.actuator(selector={"pool": "other"}).read_nodes()) == ["n9"]

    def test_a_large_cluster_comes_in_parts(self, api, monkeypatch):
        monkeypatch.setattr("ingero.remediation.actuators.kubernetes.CHUNK", 3)
        assert sorted(api.actuator().read_nodes()) == ["n1", "n2", "n3", "n4"]

    def test_a_small_cluster_is_listed_at_each_look(self, api):
        actuator = api.actuator()
        assert actuator.read_nodes()["n3"].in_service
        api.admin.patch("n3", spec={"unschedulable": True})
        assert not actuator.read_nodes()["n3"].in_service

    def test_a_large_cluster_is_listed_once_a_minute_and_in_between_asked_for_nodes_that_matter(
        self, api, monkeypatch
    ):
        monkeypatch.setattr("ingero.remediation.actuators.kubernetes.CHUNK", 3)
        clock = ManualClock()
        actuator = api.actuator(clock=clock)
        views = actuator.read_nodes()
        assert actuator.find_target(Rank("c", "n3", 0), views) == "n3"
        actuator.watch(["n2"])
        actuator.apply(replace(RECORD, target="n2"))
        api.admin.patch("n3", spec={"unschedulable": True})
        views = actuator.read_nodes()
        assert (views["n2"].mark, views["n3"].in_service) == (RECORD.action_id, True)
        with pytest.raises(PermanentError, match="n3 is out of service already"):
            actuator.apply(replace(OTHER, target="n3"))
        clock.advance(60 * NS_PER_S)
        assert not actuator.read_nodes()["n3"].in_service
        api.admin.patch("n2", spec={"taints": []})  # no finding is about n2 since: it has an action
        assert actuator.read_nodes()["n2"].mark == ""

    def test_a_node_of_a_large_cluster_that_is_gone_is_gone_at_the_next_look(
        self, api, monkeypatch
    ):
        monkeypatch.setattr("ingero.remediation.actuators.kubernetes.CHUNK", 3)
        actuator = api.actuator()
        assert "n2" in actuator.read_nodes()
        actuator.watch(["n2"])
        api.server.delete("n2")
        assert sorted(actuator.read_nodes()) == ["n1", "n3", "n4"]

    def test_a_server_that_goes_away_is_noticed_between_two_lists_of_a_large_cluster(
        self, api, monkeypatch
    ):
        monkeypatch.setattr("ingero.remediation.actuators.kubernetes.CHUNK", 3)
        actuator = api.actuator()
        actuator.read_nodes()
        monkeypatch.setattr(actuator, "_client", api.actuator("nobody")._client)
        with pytest.raises(
            RetryableError, match=r"does not tell a node: .*(Unauthorized|cannot get)"
        ):
            actuator.read_nodes()

    def test_a_node_is_found_by_the_policys_table_its_name_label_or_address(self, api):
        actuator = api.actuator(node_names={"gpu-17": "n4", "gpu-18": "gone"})
        nodes = actuator.read_nodes()
        found = {
            name: actuator.find_target(Rank("c", name, 0), nodes)
            for name in ("gpu-17", "gpu-18", "n1", "n2.site", "host-n3", "n4.cluster.site", "n9")
        }
        assert found == {
            "gpu-17": "n4", "gpu-18": "", "n1": "n1", "n2.site": "n2", "host-n3": "n3",
            "n4.cluster.site": "n4", "n9": "",
        }  # fmt: skip


class TestAction:
    def test_a_taint_its_reason_and_a_condition_say_whose_it_is(self, api):
        actuator = api.actuator()
        actuator.apply(RECORD)
        node = api.node("n1")
        (taint,) = node["spec"]["taints"]
        assert taint.items() >= OURS.items()
        assert node["metadata"]["annotations"][REASON].startswith(
            f"ingero {RECORD.action_id} {RECORD.episode}: culprit"
        )
        status, description = conditions(node)["IngeroCulprit"]
        assert status == "True"
        assert description == node["metadata"]["annotations"][REASON]
        assert conditions(node)["Ready"][0] == "True"
        assert not node["spec"].get("unschedulable")
        views = actuator.read_nodes()
        assert (views["n1"].mark, views["n1"].in_service) == (RECORD.action_id, False)
        assert all(views[name].in_service for name in ("n2", "n3", "n4"))

    def test_asked_again_it_changes_nothing_more(self, api):
        actuator = api.actuator(condition="")
        actuator.apply(RECORD)
        before = api.node("n1")
        actuator.apply(RECORD)
        assert api.node("n1") == before

    @pytest.mark.parametrize(
        "config",
        [
            {},
            {"cordon": True},
            {"taint": "", "cordon": True},
            {"taint": "NoExecute", "condition": ""},
            {"taint": "", "condition": "IngeroCulprit"},
        ],
    )
    def test_it_is_given_back_as_it_was(self, api, config):
        api.admin.patch("n1", spec={"taints": [THEIRS]}, metadata={"annotations": {"a": "b"}})
        before = api.node("n1")
        actuator = api.actuator(**config)
        actuator.apply(RECORD)
        assert actuator.read_nodes()["n1"].mark == RECORD.action_id
        assert api.node("n1") != before
        actuator.reverse(RECORD)
        after = api.node("n1")
        assert without_traces(after) == without_traces(before)
        assert after["metadata"]["annotations"] == before["metadata"]["annotations"]
        if config.get("condition", "IngeroCulprit"):
            assert conditions(after)["IngeroCulprit"][0] == "False"
        view = actuator.read_nodes()["n1"]
        assert (view.mark, view.in_service) == ("", True)

    def test_a_node_is_given_back_by_what_was_done_and_not_by_todays_policy(self, api):
        api.actuator(cordon=True).apply(RECORD)
        api.actuator(taint="", taint_key="another", condition="Another").reverse(RECORD)
        node = api.node("n1")
        assert not (node.get("spec") or {}).get("taints")
        assert not (node.get("spec") or {}).get("unschedulable")
        assert conditions(node)["IngeroCulprit"][0] == "False"

    def test_an_action_of_another_is_neither_overwritten_nor_given_back(self, api):
        actuator = api.actuator()
        actuator.apply(OTHER)
        before = api.node("n1")
        with pytest.raises(PermanentError, match="out of service already: Tainted"):
            actuator.apply(RECORD)
        actuator.reverse(RECORD)
        assert api.node("n1") == before

    @pytest.mark.parametrize("condition", ["", "IngeroCulprit"])
    def test_what_a_person_took_away_is_not_ours_any_more(self, api, condition):
        actuator = api.actuator(condition=condition)
        actuator.apply(RECORD)
        api.admin.patch("n1", spec={"taints": None})
        view = actuator.read_nodes()["n1"]
        assert (view.mark, view.in_service) == ("", True)

    def test_a_condition_alone_counts_until_it_is_taken_back(self, api):
        actuator = api.actuator(taint="")
        actuator.apply(RECORD)
        assert actuator.read_nodes()["n1"].mark == RECORD.action_id
        actuator.reverse(RECORD)
        assert actuator.read_nodes()["n1"].mark == ""

    def test_a_cordon_that_a_person_added_stays(self, api):
        actuator = api.actuator()
        actuator.apply(RECORD)
        api.admin.patch("n1", spec={"unschedulable": True})
        actuator.reverse(RECORD)
        view = actuator.read_nodes()["n1"]
        assert (view.mark, view.in_service) == ("", False)
        assert "SchedulingDisabled" in view.state

    @pytest.mark.parametrize("taint", ["NoSchedule", ""])
    def test_a_cordon_that_a_person_set_anew_is_that_persons(self, api, taint):
        actuator = api.actuator(taint=taint, condition="", cordon=True)
        actuator.apply(RECORD)
        assert actuator.read_nodes()["n1"].mark == RECORD.action_id
        api.admin.patch("n1", spec={"unschedulable": None})
        api.admin.patch("n1", spec={"unschedulable": True})
        assert bool(actuator.read_nodes()["n1"].mark) == bool(taint)
        actuator.reverse(RECORD)
        view = actuator.read_nodes()["n1"]
        assert (view.mark, view.in_service, view.state) == ("", False, "SchedulingDisabled")
        node = api.node("n1")
        assert node["spec"]["unschedulable"] is True
        assert not node["spec"].get("taints")

    def test_annotations_that_somebody_else_wrote_do_no_harm(self, api):
        notes = {REASON: f"ingero {RECORD.action_id} x", EFFECTS: "not JSON"}
        api.admin.patch("n1", metadata={"annotations": notes})
        actuator = api.actuator()
        assert actuator.read_nodes()["n1"].in_service
        actuator.reverse(RECORD)
        assert REASON not in (api.node("n1")["metadata"].get("annotations") or {})

    def test_a_node_that_is_not_there_is_refused(self, api):
        with pytest.raises(PermanentError, match='nodes "n9" not found'):
            api.actuator().apply(replace(RECORD, target="n9"))


class TestOthersChangeIt:
    def interfere(self, api, actuator, monkeypatch, times):
        """Somebody else changes the node between what is read and what is written."""
        left, patch = [times], actuator._client.patch

        def patch_later(kind, name, change, **how):
            if left[0] and "metadata" in change:
                left[0] -= 1
                api.admin.patch(name, metadata={"annotations": {"count": str(left[0])}})
            return patch(kind, name, change, **how)

        monkeypatch.setattr(actuator._client, "patch", patch_later)

    def test_a_change_of_somebody_else_is_kept_and_ours_is_made(self, api, monkeypatch):
        actuator = api.actuator()
        self.interfere(api, actuator, monkeypatch, times=2)
        actuator.apply(RECORD)
        node = api.node("n1")
        assert node["metadata"]["annotations"]["count"] == "0"
        assert node["spec"]["taints"][0]["value"] == RECORD.action_id
        self.interfere(api, actuator, monkeypatch, times=2)
        actuator.reverse(RECORD)
        assert actuator.read_nodes()["n1"].in_service

    def test_one_who_never_stops_is_given_up_until_the_next_look(self, api, monkeypatch):
        actuator = api.actuator()
        self.interfere(api, actuator, monkeypatch, times=100)
        with pytest.raises(RetryableError, match="keeps changing n1"):
            actuator.apply(RECORD)
        assert actuator.read_nodes()["n1"].in_service

    def test_a_node_that_was_cordoned_meanwhile_is_left_alone(self, api, monkeypatch):
        actuator = api.actuator()
        patch = actuator._client.patch

        def cordon_first(kind, name, change, **how):
            api.admin.patch(name, spec={"unschedulable": True})
            return patch(kind, name, change, **how)

        monkeypatch.setattr(actuator._client, "patch", cordon_first)
        with pytest.raises(PermanentError, match="SchedulingDisabled"):
            actuator.apply(RECORD)
        assert "IngeroCulprit" not in conditions(api.node("n1"))


class TestRights:
    def test_a_rehearsal_stores_nothing(self, api):
        before = api.node("n1")
        api.actuator(cordon=True).rehearse(RECORD)
        assert api.node("n1") == before

    def test_who_may_only_read_is_refused_before_and_when_it_acts(self, api):
        grant_reading(api.server)
        actuator = api.actuator(READER)
        before = api.node("n1")
        assert actuator.read_nodes()["n1"].in_service
        for ask in (actuator.rehearse, actuator.apply):
            with pytest.raises(PermanentError, match=r"does not change a node: .*cannot patch"):
                ask(RECORD)
        assert api.node("n1") == before

    def test_who_may_do_nothing_is_told_at_each_look(self, api):
        with pytest.raises(
            RetryableError, match=r"does not tell its nodes: .*(Unauthorized|cannot list)"
        ):
            api.actuator("nobody").read_nodes()


def grant_reading(server):
    if not hasattr(server, "authority"):
        return  # the small one has it from the start
    rule = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]}
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole"}
    server.post(
        "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        role | {"metadata": {"name": "reading"}, "rules": [rule]},
    )
    group = "rbac.authorization.k8s.io"
    server.post(
        "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "reading"},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "reading"},
            "subjects": [{"apiGroup": group, "kind": "User", "name": "reader"}],
        },
    )


class TestRemediator:
    def build_site(self, api, tmp_path, **config):
        site = Site(tmp_path / "journal.db", build_config())
        site.slurm = api.actuator(**config)
        site.start()
        return site

    def test_the_node_of_a_culprit_is_tainted_and_given_back_when_a_person_asks(
        self, api, tmp_path
    ):
        site = self.build_site(api, tmp_path, cordon=True)
        site.poll(6, ["n2"])
        assert site.states() == ["done"]
        (record,) = site.journal.actions()
        assert (record.target, record.kind) == ("n2", "kubernetes")
        assert api.node("n2")["spec"]["unschedulable"] is True
        for name in ("n1", "n3", "n4"):
            assert not (api.node(name).get("spec") or {}).get("taints")
        undoing = replace(record, state=ActionState.UNDOING, is_asked_back=True)
        site.journal.change(record, undoing)
        site.poll(3, [])
        assert site.states() == ["undone"]
        assert api.actuator().read_nodes()["n2"].in_service

    def test_a_remediator_without_rights_says_so_and_nothing_stays(self, api, tmp_path):
        grant_reading(api.server)
        site = Site(tmp_path / "journal.db", build_config())
        site.slurm = api.actuator(READER)
        site.start()
        site.poll(10, ["n2"])
        record = site.journal.actions()[0]
        assert record.state is ActionState.VOID
        notes = [one["note"] for one in site.journal.changes(record.action_id)]
        assert any("cannot patch" in note for note in notes)

    def test_a_node_that_a_person_uncordons_is_left_to_that_person(self, api, tmp_path):
        site = self.build_site(api, tmp_path, taint="", condition="", cordon=True)
        site.poll(6, ["n2"])
        assert site.states() == ["done"]
        api.admin.patch("n2", spec={"unschedulable": None})
        site.poll(6, [])
        assert site.states() == ["left"]

    def test_a_cordon_that_a_person_sets_anew_ends_the_action(self, api, tmp_path):
        site = self.build_site(api, tmp_path, taint="", condition="", cordon=True)
        site.poll(6, ["n2"])
        api.admin.patch("n2", spec={"unschedulable": False})
        api.admin.patch("n2", spec={"unschedulable": True})
        site.poll(6, [])
        assert site.states() == ["left"]
        assert api.node("n2")["spec"]["unschedulable"] is True
