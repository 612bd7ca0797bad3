"""Which rank of a job ended first, from how and when each ended."""

import pytest

from ingero.detect.endings import NEAR_NS, find_first_ended
from ingero.model.progress import Ending

KILLED, FAILED, ENDED_BY_LAUNCHER, WELL = {"signal": 9}, {"status": 1}, {"signal": 15}, {}


@pytest.mark.parametrize(
    ("endings", "first"),
    [
        ({}, ()),
        ({0: (0, WELL), 1: (9, WELL)}, ()),
        ({0: (0, WELL), 1: (9, FAILED), 2: (11, FAILED)}, (1,)),
        ({0: (1, FAILED), 1: (9, KILLED)}, (0,)),
        ({0: (1, FAILED), 1: (1.5, KILLED)}, (1,)),
        ({0: (1, KILLED), 1: (1.5, KILLED), 2: (9, KILLED)}, (0, 1)),
        ({0: (1, FAILED), 1: (1.5, FAILED), 2: (9, FAILED)}, ()),
        ({0: (1, ENDED_BY_LAUNCHER), 1: (1.5, FAILED)}, ()),
        ({0: (1, {"signal": 6}), 1: (1.5, {"signal": 11})}, (1,)),
    ],
)
def test_first_is_who_failed_earliest_and_within_reach_of_it_who_was_killed(endings, first):
    """Times are in multiples of what two endings must differ by, less a little."""
    given = {rank: Ending(int(at * 0.99 * NEAR_NS), **how) for rank, (at, how) in endings.items()}
    assert find_first_ended(given) == first
