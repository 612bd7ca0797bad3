"""What users type for a fault, and what a run counts as its detection."""

import os

import pytest

from ingero.errors import ConfigError
from ingero.sim.cluster.faults import JOB_KINDS, KINDS, Fault, parse_fault, parse_faults
from ingero.sim.cluster.result import Progress, UpSettings, build_result, find_detection
from ingero.units import NS_PER_S


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("slow-rank:3:1.3x", Fault("slow-rank", 3, 1.3)),
        ("slow-rank:0:2", Fault("slow-rank", 0, 2.0)),
        ("imbalance", Fault("imbalance", None, 1.6)),
        ("imbalance:2x", Fault("imbalance", None, 2.0)),
        ("pause:5", Fault("pause", 5)),
        ("kill:7", Fault("kill", 7)),
        ("cpu-hog:2", Fault("cpu-hog", 2)),
        ("io-hog:0", Fault("io-hog", 0)),
        ("slow-link:1", Fault("slow-link", 1, 20.0)),
        ("slow-link:1:5ms", Fault("slow-link", 1, 5.0)),
    ],
)
def test_fault_is_read(text, fault):
    assert parse_fault(text, 8) == fault
    assert fault.kind in KINDS


@pytest.mark.parametrize(
    "text",
    ["", "slow", "slow-rank", "slow-rank:3", "slow-rank:x:2", "slow-rank:3:1x", "pause:8",
     "pause:-1", "pause", "kill:1:2", "slow-rank:3:nanx", "imbalance:3:1.6x", "slow-link:1:0ms",
     "slow-link:1:-5ms", "slow-link:1:5", "slow-link:1:1001ms"],
)  # fmt: skip
def test_what_is_no_fault_is_refused(text):
    with pytest.raises(ConfigError, match="--fault"):
        parse_fault(text, 8)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("cpu-quota:2:50%", Fault("cpu-quota", 2, 0.5)),
        ("stop-pulses:0:30%", Fault("stop-pulses", 0, 0.3)),
        ("slow-rank:1:1.3x", Fault("slow-rank", 1, 1.3)),
        ("cpu-hog:3", Fault("cpu-hog", 3)),
        ("disk:3:5MB/s", Fault("disk", 3, 5_000_000)),
        ("disk:0:0.5GB/s", Fault("disk", 0, 500_000_000)),
        ("slow-python:2:20ms", Fault("slow-python", 2, 0.02)),
        ("slow-loader:2:0.5ms", Fault("slow-loader", 2, 0.0005)),
        ("garbage:0:200000", Fault("garbage", 0, 200_000)),
        ("first-use:1:2s", Fault("first-use", 1, 2.0)),
        ("uneven:1:1.5x", Fault("uneven", 1, 1.5)),
        ("imbalance", Fault("imbalance", None, 1.6)),
        ("link:2:20ms", Fault("link", 2, 20, "ms")),
        ("link:2:50Mbit/s", Fault("link", 2, 50_000_000, "bit/s")),
    ],
)
def test_fault_of_a_real_job_is_read(text, fault):
    assert parse_faults([text, "none"], 4, is_job=True) == (fault,)
    assert fault.kind in JOB_KINDS


@pytest.mark.parametrize(
    "text",
    [
        *("cpu-quota:2", "cpu-quota:2:0%", "cpu-quota:2:100%", "stop-pulses:1:x", "imbalance:1x"),
        *("disk:1", "disk:1:5", "disk:1:5MB", "disk:1:9kB/s", "disk:1:-5MB/s", "disk:1:5Mbit/s"),
        *("slow-python:1", "slow-python:1:20", "slow-python:1:0ms", "slow-python:1:11s"),
        *("garbage:1:0", "garbage:1:many", "garbage:1:10000001", "uneven:1:1x", "first-use:1:2m"),
        *("link:1", "link:1:5", "link:1:5MB/s", "link:1:0ms", "link:1:1001ms", "link:1:9kbit/s"),
    ],
)
def test_what_cannot_be_done_to_a_real_job_is_refused(text):
    with pytest.raises(ConfigError, match="--fault") as refused:
        parse_fault(text, 4, is_job=True)
    assert "cpu-quota:R:50%" in refused.value.hint
    with pytest.raises(ConfigError, match="--fault"):
        parse_fault("cpu-quota:2:50%", 4)


@pytest.mark.parametrize(
    ("text", "n_ranks", "least"),
    [
        ("cpu-quota:2:0.0001%", 4, "0.4%"),
        ("cpu-quota:2:0.39%", 4, "0.4%"),
        ("cpu-quota:2:6%", 64, "6.4%"),
        ("slow-rank:1:20x", 64, "6.4%"),
    ],
)
def test_less_time_than_the_kernel_can_give_is_refused_before_the_run(
    monkeypatch, text, n_ranks, least
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(ConfigError, match=f"--fault .* a host keeps at least {least} of"):
        parse_fault(text, n_ranks, is_job=True)


def test_the_least_time_that_the_kernel_can_give_is_taken(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for text, n_ranks in (
        ("cpu-quota:2:0.4%", 4),
        ("slow-rank:1:15x", 64),
        ("slow-python:1:2s", 64),
    ):
        assert parse_fault(text, n_ranks, is_job=True).rank in {1, 2}


@pytest.mark.parametrize("n_ranks", [4, 7])
def test_link_without_links_to_compare_it_with_is_refused(n_ranks):
    with pytest.raises(ConfigError, match="do not make links"):
        parse_fault("slow-link:1", n_ranks)


def settings(*faults):
    return UpSettings(8, faults, 0, 30 * NS_PER_S, 5 * NS_PER_S)


def test_detection_is_when_the_last_fault_was_named_by_its_own_kind():
    both = settings(Fault("slow-rank", 3, 1.3), Fault("pause", 5))
    progress = Progress(named={(3, "culprit"): 2 * NS_PER_S, (5, "culprit"): NS_PER_S})
    assert find_detection(both, progress) is None
    progress.named[5, "hang"] = 4 * NS_PER_S
    assert find_detection(both, progress) == 4.0


def test_rank_named_before_its_fault_is_no_detection():
    progress = Progress(named={(3, "culprit"): None})
    assert find_detection(settings(Fault("slow-rank", 3, 1.3)), progress) is None


def test_everybody_ever_named_without_a_fault_is_told():
    progress = Progress(
        named={(3, "culprit"): NS_PER_S, (6, "culprit"): NS_PER_S, (1, "hang"): None}
    )
    result = build_result(settings(Fault("slow-rank", 3, 1.3)), progress)
    assert result["culprits"] == [3, 6]
    assert result["missing_ranks"] == [1]
    assert result["wrongly_named"] == [1, 6]
    assert result["detection_s"] == 1.0


def test_imbalance_has_no_detection_and_anybody_named_is_wrong():
    progress = Progress(named={(6, "culprit"): NS_PER_S})
    result = build_result(settings(Fault("imbalance", None, 1.6)), progress)
    assert result["detection_s"] is None
    assert result["wrongly_named"] == [6]


def test_either_end_of_a_slow_link_may_be_named_and_neither_is_a_culprit():
    link = settings(Fault("slow-link", 2, 20.0))
    progress = Progress(named={(3, "network"): 4 * NS_PER_S, (2, "network"): 5 * NS_PER_S})
    result = build_result(link, progress)
    assert (result["network"], result["detection_s"]) == ([2, 3], 4.0)
    assert result["wrongly_named"] == []
    progress.named[2, "culprit"] = 6 * NS_PER_S
    assert build_result(link, progress)["wrongly_named"] == [2]


def test_a_slow_link_of_a_real_job_is_no_ranks_own_and_only_a_late_one_needs_another_device():
    late, narrow = Fault("link", 2, 20, "ms"), Fault("link", 1, 50_000_000, "bit/s")
    assert settings(late, narrow).slowable_links == [2]
    progress = Progress(named={(2, "culprit"): NS_PER_S, (1, "network"): NS_PER_S})
    assert build_result(settings(late, narrow), progress)["wrongly_named"] == [2]


def test_without_probes_the_result_says_whose_word_it_is():
    asked = UpSettings(8, (), 0, NS_PER_S, NS_PER_S, has_probes=False)
    result = build_result(asked, Progress())
    assert result["probes"] is False
    assert "report their own calls, no probes" in result["note_on_work"]
    assert asked.probes_note == "no probes: the simulator reports its own calls"


def test_of_what_happens_once_nothing_must_be_said():
    assert Fault("first-use", 1, 2.0).ranks == ()
    assert Fault("slow-python", 1, 0.02).ranks == (1,)


def test_a_program_is_asked_for_one_fault_and_a_second_is_not_dropped_in_silence():
    two = ["slow-python:2:20ms", "uneven:2:1.5x"]
    with pytest.raises(ConfigError, match="rank 2's program makes one fault at a time"):
        parse_faults(two, 4, is_job=True)
    assert len(parse_faults([two[0], "uneven:1:1.5x", "cpu-quota:2:50%"], 4, is_job=True)) == 3
    with pytest.raises(ConfigError, match="each rank's program makes one fault at a time"):
        parse_faults([two[0], "imbalance:2x"], 4, is_job=True)
    assert len(parse_faults(["imbalance", "slow-rank:1:1.3x"], 4)) == 2, "of the simulator any"
