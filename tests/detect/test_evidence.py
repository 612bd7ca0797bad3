"""What is known of a worker goes with it to other peers."""

import pytest

from ingero.detect.episodes import AlarmEpisode, OnsetState
from ingero.detect.evidence import RankEvidence
from ingero.detect.groups import PeerGroup
from ingero.detect.ranks.settings import ALARM, EDetectorSettings


@pytest.mark.parametrize("by_sums", [True, False])
def test_a_worker_in_alarm_for_bursts_stays_so_beside_new_peers(by_sums):
    evidence = RankEvidence(EDetectorSettings(), 0)
    evidence.grow(4)
    worker = evidence.of_worker(1)
    worker.current[ALARM] = AlarmEpisode(
        tier=ALARM,
        onset=OnsetState(),
        onset_op=0,
        since_op=0,
        detected_ns=0,
        n_ops_to_detect=1,
        is_pooled=True,
        log10_evidence=6.0,
        by_sums=by_sums,
    )
    group = PeerGroup(0, [0, 1, 2, 3], is_open=True)
    evidence.add_group(group)
    alarms = evidence.of_group(group).detector.alarms
    assert alarms.in_alarm[ALARM, 0].tolist() == [False, True, False, False]
    assert alarms.by_sums[ALARM, 0].tolist() == [False, by_sums, False, False]
