"""Names of ranks that no launcher told, or several have."""

from ingero.agent.collectives.rank_names import RankNames, number_job
from ingero.agent.health.push_body import NodeIdentity


def test_jobs_are_told_apart_by_what_their_ranks_have_in_common():
    shared = number_job("", "10.0.0.1:29500", boot="a")
    assert shared == number_job("", "10.0.0.1:29500", boot="b")
    others = {
        number_job("", "10.0.0.2:29500", boot="a"),
        number_job("7", "10.0.0.1:29500", boot="a"),
        number_job("", "127.0.0.1:29500", boot="a"),
        number_job("", "127.0.0.1:29500", boot="b"),
        number_job("", "localhost:29500", boot="b"),
        number_job("", "", boot="a"),
        number_job("", "", boot="b"),
    }
    assert len(others | {shared}) == 8
    assert number_job("7", "", boot="a") == number_job("7", "", boot="b")


def test_two_that_lived_together_are_two_workers_although_both_ended_before_they_were_named():
    ended = {}
    names = RankNames(NodeIdentity(cluster_id="c", node_id="n"), ended)
    for pid in (1, 2):
        names.add(pid, 0, "")
    ended.update(dict.fromkeys((1, 2)))
    assert [names.name(pid, 0).job for pid in (1, 2)] == ["", "2"]
    names.add(3, 0, "")
    assert names.name(3, 0).job == ""


def test_more_about_where_a_process_runs_leaves_its_name_as_it_is():
    names = RankNames(NodeIdentity(cluster_id="c", node_id="n"), {})
    names.add(1, 0, "")
    names.add(2, 0, "")
    assert [names.name(pid, 0).job for pid in (1, 2)] == ["", "2"]
    pod = (("ingero.device.ids", "nvidia.com/gpu=GPU-a"),)
    for pid in (1, 2):
        names.add(pid, 0, "", pod)
    named = [names.name(pid, 0) for pid in (2, 1)]
    assert [(rank.job, rank.resource) for rank in named] == [("2", pod), ("", pod)]
