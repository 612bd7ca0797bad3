"""The program between a real Fleet, which names a node, and a Kubernetes that has it."""

import json
import subprocess
import sys

import pytest
from tests.remediation.kubernetes.real_server import READER, REMEDIATOR
from tests.remediation.kubernetes.test_kubernetes import grant_reading
from tests.remediation.live import run_job, write_policy
from tests.remediation.test_slurm import ask, find_actions

from ingero.sim.launcher import launch
from ingero.testing.waiting import wait_until

pytestmark = pytest.mark.slow
ACTION = "action: {{kubernetes: {{kubeconfig: {file}, cordon: true, node_names: {{node5: n2}}}}}}\n"


def write_kubernetes_policy(folder, agents, kubeconfig):
    file = write_policy(folder, agents)
    lines = [one for one in file.read_text().splitlines() if not one.startswith("action:")]
    file.write_text("\n".join(lines) + "\n" + ACTION.format(file=kubeconfig))
    return file


def is_named(pushes):
    pushes.push()
    return pushes.find_culprits() == ["node5"]


def poll_once(file, *more):
    program = "from ingero.cli.programs.remediator import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, str(file), "--dry-run", "--once", *more],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip


def test_a_verdict_taints_the_node_and_a_person_gives_it_back(api, tmp_path):
    before = api.node("n2")
    with run_job() as (agents, pushes):
        file = write_kubernetes_policy(tmp_path, agents, api.kubeconfig(REMEDIATOR))
        wait_until(lambda: is_named(pushes))
        page = json.loads(poll_once(file, "--json"))
        (finding,) = page["findings"]
        assert (finding["target"], finding["would_act"], finding["refusal"]) == ("n2", True, "")
        assert api.node("n2") == before
        with launch("ingero.cli.programs.remediator", ["run", str(file)]):

            def is_tainted():
                pushes.push()
                return (api.node("n2").get("spec") or {}).get("taints")

            wait_until(is_tainted)
            (action,) = wait_until(lambda: find_actions(file, "done"))
            node = api.node("n2")
            assert node["spec"]["unschedulable"] is True
            assert any(one.get("value") == action.action_id for one in node["spec"]["taints"])
            description = [
                one for one in node["status"]["conditions"] if one["type"] == "IngeroCulprit"
            ]
            assert f"{action.episode}: culprit rank 5" in description[0]["message"]
            for name in ("n1", "n3", "n4"):
                assert not (api.node(name).get("spec") or {}).get("taints")
            assert "undoing" in ask(file, "undo", action.action_id)
            wait_until(lambda: find_actions(file, "undone"))
            assert not (api.node("n2").get("spec") or {}).get("unschedulable")


def test_missing_rights_are_told_before_anything_is_done(api, tmp_path):
    grant_reading(api.server)
    with run_job() as (agents, pushes):
        file = write_kubernetes_policy(tmp_path, agents, api.kubeconfig(READER))
        wait_until(lambda: is_named(pushes))
        said = wait_until(lambda: find_refusal(pushes, file))
        assert "but it would be refused: Kubernetes does not change a node:" in said


def find_refusal(pushes, file):
    """A poll at which the policy lets it through; the finding must be fresh."""
    pushes.push()
    said = poll_once(file)
    return said if "refused" in said else ""
