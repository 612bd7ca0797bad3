"""HealthCheckProgram under Debian's own Slurm."""

import shlex
import stat
import sys
from dataclasses import replace

import pytest
from tests.remediation.real_site import RealSite

from ingero.cli.metrics_page import serve_metrics
from ingero.remediation.orders import find_order
from ingero.remediation.page import RemediatorPage
from ingero.remediation.records import ActionState
from ingero.sim.cluster.slurm import SlurmNode, run_slurm
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm"), pytest.mark.slow]
RUN_CHECK = "from ingero.cli.programs.health_check import main; main()"


@pytest.fixture
def checked(tmp_path_factory, tmp_path, monkeypatch):
    """A Slurm of two nodes whose HealthCheckProgram asks the address that a file has."""
    folder = tmp_path_factory.mktemp("h")
    program = folder / "check"
    program.write_text(
        "#!/bin/sh\n"
        f"export SLURM_CONF={folder}/slurm.conf\n"
        f"url=$(cat {folder}/url 2>/dev/null)\n"
        f'exec {shlex.quote(sys.executable)} -c {shlex.quote(RUN_CHECK)} "${{url:-http://127.0.0.1:9}}" "$SLURMD_NODENAME"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    settings = {
        "HealthCheckProgram": str(program),
        "HealthCheckInterval": "1",
        "SlurmdDebug": "debug2",
    }
    nodes = [SlurmNode("h1"), SlurmNode("h2")]
    with run_slurm(folder, nodes, settings=settings) as running:
        for name, value in running.environ.items():
            monkeypatch.setenv(name, value)
        yield RealSite(tmp_path, running, "action: {slurm: {drained_by: health-check}}\n")


def test_the_node_drains_itself_and_gives_itself_back_as_the_remediator_tells_it(checked):
    site, slurm = checked, checked.slurm
    log = slurm.folder / "slurmd.h2.log"
    wait_until(lambda: "no answer of http://127.0.0.1:9" in log.read_text())
    assert set(slurm.states().values()) == {"idle"}  # it fails open
    page = RemediatorPage(
        site.remediator.counts, site.path, None,
        lambda node: find_order(site.remediator.orders, node, site.now(), 5 * NS_PER_S),
    )  # fmt: skip
    with serve_metrics(page, "127.0.0.1:0", "listen") as bound:
        (slurm.folder / "url").write_text(f"http://{bound}")
        for _ in range(3):
            site.poll("h2")
        assert site.states() == [ActionState.BEGUN]
        wait_until(lambda: slurm.states() == {"h1": "idle", "h2": "drain"})
        site.poll("h2", 0.1)
        assert site.states() == [ActionState.DONE]
        (action,) = site.journal.actions()
        reason = slurm.run("sinfo", "-h", "-n", "h2", "-o", "%E")
        assert reason.startswith(f"ingero {action.action_id} {action.episode}: culprit rank 0")
        ask_back(site, action)
        site.poll("h2", 0.1)
        wait_until(lambda: slurm.states()["h2"].rstrip("*") == "idle")  # not pinged yet
        site.poll("h2", 5)
        assert site.states() == [ActionState.UNDONE]
    assert "health_check failed" not in log.read_text()
    assert "drained: ingero a" in log.read_text()


def ask_back(site, action):
    site.journal.change(action, replace(action, state=ActionState.UNDOING, is_asked_back=True))
