"""Pair tests under Debian's own Slurm."""

import json

import pytest
from tests.remediation.real_site import RealSite

from ingero.remediation.pair_tests import PairOutcome, PairTestState
from ingero.remediation.records import ActionState
from ingero.sim.cluster.cleanup import open_cleanup
from ingero.sim.cluster.shares import open_shares
from ingero.sim.cluster.slurm import SlurmNode, run_slurm
from ingero.testing.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm"), pytest.mark.slow]
TEST = "confirm: {pair_test: {rounds: 6, min_ratio: 1.5, max_wait: 10m}}\naction: {slurm: {}}\n"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Three nodes; the first has a fifth of a processor."""
    folder = tmp_path_factory.mktemp("s")
    with open_cleanup() as cleanup, open_shares(3, cleanup, n_busy=1) as shares:
        shares[0].limit(0.2)
        nodes = [
            SlurmNode(f"h{number + 1}", members=share.members[0])
            for number, share in enumerate(shares)
        ]
        with run_slurm(folder, nodes) as running:
            yield running


@pytest.fixture
def start_site(slurm, tmp_path, monkeypatch):
    """Makes a site on a cluster whose nodes are all idle."""
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    slurm.run("scancel", "-u", "root")
    for node, state in slurm.states().items():
        if state.startswith("dr"):
            slurm.run("scontrol", "update", f"nodename={node}", "state=undrain")
    wait_until(lambda: set(slurm.states().values()) == {"idle"})
    return lambda text=TEST, protected="none": RealSite(tmp_path, slurm, text, protected)


@pytest.mark.live
def test_a_slow_node_is_confirmed_by_a_test_that_outlives_the_remediator_and_then_drained(
    slurm, start_site
):
    site = start_site()
    for _ in range(3):
        site.poll("h1")
    (begun,) = site.tests()
    assert (begun.state, begun.suspect, begun.peer) == (PairTestState.SUBMITTED, "h1", "h2")
    site.restart()
    ended = site.follow_test("h1")
    assert ended.outcome is PairOutcome.CONFIRMS, ended
    assert (ended.test_id, ended.job) == (begun.test_id, begun.job)
    assert {node: len(times) for node, times in ended.times.items()} == {"h1": 6, "h2": 6}
    assert "MB/s between both" in ended.note
    for _ in range(3):  # after a restart it settles first
        site.poll("h1")
    assert site.states() == [ActionState.DONE]
    assert slurm.states() == {"h1": "drain", "h2": "idle", "h3": "idle"}
    (action,) = site.journal.actions()
    (clause,) = [one for one in action.clauses if one["clause"] == "confirm.pair_test"]
    assert clause["says"].startswith("confirms: h1 takes ")
    site.poll("h1", 5)
    assert [one.state for one in site.tests()] == [PairTestState.CLOSED]


@pytest.mark.live
def test_a_healthy_node_is_contradicted_and_left_alone(slurm, start_site):
    site = start_site(protected="h1")  # which would be its peer
    for _ in range(3):
        site.poll("h3")
    ended = site.follow_test("h3")
    assert ended.outcome is PairOutcome.CONTRADICTS, ended
    assert (ended.suspect, ended.peer) == ("h3", "h2")
    ruling = site.poll("h3").rulings[0]
    assert [one.clause for one in ruling.stops] == ["confirm.pair_test"]
    assert ruling.stops[0].description.startswith("contradicts: h3 takes ")
    assert site.states() == []
    assert set(slurm.states().values()) == {"idle"}


def test_a_test_for_which_no_node_is_free_is_cancelled_and_tells_nothing(slurm, start_site):
    site = start_site()
    for _ in range(3):
        slurm.run("sbatch", "--parsable", "-N1", "--wrap", "sleep 600")
    wait_until(lambda: set(slurm.states().values()) == {"alloc"})
    for _ in range(3):
        site.poll("h1")
    (begun,) = site.tests()
    assert begun.state is PairTestState.SUBMITTED
    site.poll("h1", 700)
    (ended,) = site.tests()
    assert ended.outcome is PairOutcome.CANNOT_TELL
    assert ended.note.startswith("the nodes were not free for 11.7 m: ")
    assert slurm.run("squeue", "-h", "-n", f"ingero-pair-{begun.test_id}").strip() == ""
    assert site.states() == []


def test_a_command_of_the_sites_own_decides_instead(slurm, start_site):
    """Here it says the opposite of what is so."""
    script = (
        "echo warming up; "
        """echo '{"node": "'$INGERO_PAIR_SUSPECT'", "rounds_s": [1, 1, 1, 1]}'; """
        """echo '{"node": "'$INGERO_PAIR_PEER'", "rounds_s": [3, 3, 3, '$INGERO_PAIR_ROUNDS']}'"""
    )
    command = json.dumps(["sh", "-c", script])
    site = start_site(
        f"confirm: {{pair_test: {{rounds: 4, command: {command}}}}}\naction: {{slurm: {{}}}}\n"
    )
    for _ in range(3):
        site.poll("h1")
    ended = site.follow_test("h1")
    assert (ended.outcome, ended.note) == (
        PairOutcome.CONTRADICTS,
        "h1 takes 0.33 times as long as h2 (0.25 to 0.33)",
    )
