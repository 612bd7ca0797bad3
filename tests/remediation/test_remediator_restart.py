"""A remediator that was killed or restarted goes on from its journal, and several clusters of one scheduler share its counts."""

from dataclasses import replace

import pytest
from tests.remediation.site import Site, build_config
from tests.remediation.site_work import ask_back, give_back

from ingero.model.verdicts import VerdictKind
from ingero.testing.remediation import build_reading, build_verdict
from ingero.units import NS_PER_S


class Killed(BaseException):
    """What kill -9 does: nothing more runs."""


@pytest.mark.parametrize("step", ["before apply", "after apply", "before requeue", "after requeue"])
def test_what_a_killed_remediator_had_begun_is_finished_by_the_next(site, step):
    site.slurm.jobs = {"7": 0}

    def kill(what):
        if what == step:
            raise Killed

    site.before = kill
    with pytest.raises(Killed):
        site.poll(9, ["n2"])
    assert site.states() == ["begun"]  # written before anything was asked
    site.before = lambda _: None
    site.start()
    site.poll(20, ["n2"])
    assert site.drained == {"n2"}
    assert site.states()[-1] == "done"
    assert site.slurm.requeued == ["7"]


def test_what_was_killed_within_an_undo_is_undone_by_the_next(site):
    site.poll(5, ["n2"])
    (action,) = site.journal.actions()

    def kill(what):
        raise Killed

    site.before = kill
    ask_back(site, action)
    with pytest.raises(Killed):
        site.poll(1)
    assert site.states() == ["undoing"]
    site.before = lambda _: None
    site.start()
    site.poll(2)
    assert (site.drained, site.states()) == (set(), ["undone"])


def test_the_next_process_keeps_the_budget_and_the_episode(site):
    site.poll(5, ["n2"])
    site.start()
    site.poll(20, ["n2", "n3"])
    assert (site.drained, len(site.journal.actions())) == ({"n2"}, 1)
    assert {one.node_id for one in site.journal.findings()} == {"n2", "n3"}


def say_of_two(site, first, second, times=6):
    """Polls at which each of two clusters has these culprits."""
    for _ in range(times):
        site.n_ops += 1
        readings = {}
        for cluster_id, nodes in (("c", first), ("d", second)):
            one = build_reading(*(build_verdict(node, n_ops=site.n_ops) for node in nodes))
            judgement = replace(
                one.judgement,
                cluster_id=cluster_id,
                verdicts=tuple(
                    replace(verdict, rank=replace(verdict.rank, cluster_id=cluster_id))
                    for verdict in one.judgement.verdicts
                ),
            )
            readings[cluster_id] = replace(one, judgement=judgement)
        site.fleet.clusters = readings
        site.poll()


@pytest.mark.parametrize(
    "limits", ["max_nodes_per_hour: 9", "max_nodes_at_once: 9, max_nodes_per_hour: 1"]
)
def test_clusters_of_one_scheduler_share_the_counts_of_the_policy(tmp_path, limits):
    site = Site(tmp_path / "j.db", build_config(brakes=limits))
    say_of_two(site, ["n1"], ["n2"])
    assert len(site.drained) == 1
    assert len(site.journal.actions()) == 1


def test_a_share_is_of_the_findings_own_cluster(tmp_path):
    """One node of a hundred is one percent of each."""
    limits = "max_nodes_at_once: 9, max_nodes_per_hour: 9"
    config = build_config(brakes=limits)
    brakes = config.brakes.model_copy(update={"max_percent_at_once": 1, "max_percent_per_hour": 1})
    site = Site(tmp_path / "j.db", config.model_copy(update={"brakes": brakes}))
    say_of_two(site, ["n1", "n3"], ["n2"])
    assert len(site.drained & {"n1", "n3"}) == 1
    assert site.drained >= {"n2"}


@pytest.mark.parametrize("other", ["n1", "n1.example"])
def test_a_node_that_two_clusters_have_to_the_scheduler_is_left_alone(site, other):
    say_of_two(site, ["n1"], [other], times=9)
    assert site.drained == set()
    assert not site.journal.actions()
    stopped = {
        clause["clause"]
        for one in site.journal.findings()
        for clause in one.clauses
        if not clause["met"]
    }
    assert stopped == {"node known"}


@pytest.mark.parametrize(
    ("culprit", "other", "renamed"),
    [
        ("n1.rack-a", "n1.rack-b", {}),
        ("n1", "n1.rack-b", {}),
        ("gpu-17.example", "n1", {"gpu-17.example": "n1"}),
        ("n1", "gpu-17.example", {"gpu-17.example": "n1"}),
    ],
)
def test_a_node_that_is_two_of_fleets_to_the_scheduler_is_left_alone(site, culprit, other, renamed):
    """Within one cluster: the other one may be of a part of the site that this scheduler does not know."""
    site.slurm.renamed = renamed
    for _ in range(6):
        site.n_ops += 1
        ordinary = build_verdict(other, VerdictKind.ORDINARY, n_ops=site.n_ops)
        site.fleet.say(build_verdict(culprit, n_ops=site.n_ops), ordinary)
        site.poll()
    assert site.drained == set()
    assert not site.journal.actions()
    site.poll(9, [culprit])
    assert site.drained == {"n1"}


@pytest.mark.parametrize("hours", [0.1, 7])
def test_an_episode_goes_on_after_a_restart_only_if_its_break_was_short(tmp_path, hours):
    site = Site(tmp_path / "j.db", build_config(brakes="cool_down: 1m, max_nodes_per_hour: 9"))
    site.poll(5, ["n2"])
    give_back(site)
    site.journal.close()
    site.clock.advance(int(hours * 3600 * NS_PER_S))
    site.start()
    site.poll(9, ["n2"])
    n_episodes = len({one.episode for one in site.journal.findings()})
    assert (n_episodes, site.drained) == ((1, set()) if hours < 1 else (2, {"n2"}))
    assert sum(one.is_open for one in site.journal.findings()) == 1


def test_an_episode_of_which_nothing_changed_for_hours_goes_on_after_a_restart(tmp_path):
    site = Site(tmp_path / "j.db", build_config(brakes="cool_down: 1m, max_nodes_per_hour: 9"))
    site.poll(5, ["n2"])
    give_back(site)
    for _ in range(30):
        site.clock.advance(300 * NS_PER_S)
        site.poll(1, ["n2"])
    site.journal.close()
    site.start()
    site.poll(9, ["n2"])
    assert len({one.episode for one in site.journal.findings()}) == 1
    assert site.drained == set()
