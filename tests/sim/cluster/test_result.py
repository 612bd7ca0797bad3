"""Who counts as wrongly named in the result of ``ingero up``."""

from types import SimpleNamespace

import pytest

from ingero.sim.cluster.faults import parse_fault
from ingero.sim.cluster.result import Progress, find_diagnosis, find_wrongly_named


@pytest.mark.parametrize(
    ("fault", "named", "wrongly"),
    [
        ("cpu-quota:2:50%", {(2, "culprit"): 1}, []),
        ("cpu-quota:2:50%", {(2, "culprit"): 1, (0, "culprit"): 2, (1, "network"): 3}, [0, 1]),
        ("slow-link:3", {(2, "network"): 1, (3, "network"): 1}, []),
        ("slow-link:3", {(2, "network"): 1, (3, "culprit"): 2, (4, "network"): 3}, [3, 4]),
        ("link:3:20ms", {(2, "network"): 1, (3, "network"): 1, (5, "network"): 2}, []),
        ("link:3:20ms", {(3, "culprit"): 1, (0, "culprit"): 1}, [0, 3]),
    ],
)
def test_whoever_has_no_fault_is_wrongly_named_but_for_the_other_ends_of_a_link(
    fault, named, wrongly
):
    settings = SimpleNamespace(faults=(parse_fault(fault, 6, is_job="slow-link" not in fault),))
    assert find_wrongly_named(settings, Progress(named=named)) == wrongly


def test_why_peers_are_slow_in_turns_is_no_answer_about_the_rank_with_the_fault():
    settings = SimpleNamespace(faults=(parse_fault("cpu-quota:2:50%", 4, is_job=True),))
    progress = Progress(uneven={2: ({"cause": "more-computing"}, 1), 1: ({"cause": "stopped"}, 2)})
    found = find_diagnosis(settings, progress)
    assert (found["rank"], found["cause"], found["is_named"]) == (2, "more-computing", False)
    progress.named[2, "culprit"] = 3
    progress.diagnoses[2] = ({"cause": "cpu-quota"}, 5)
    found = find_diagnosis(settings, progress)
    assert (found["rank"], found["cause"], found["is_named"]) == (2, "cpu-quota", True)
