"""What an episode says of its workload."""

import itertools
import json

from ingero.agent.events.alert.episodes import Episodes
from ingero.agent.health.open_episodes import NodeEpisodes
from ingero.agent.health.push_body import NodeIdentity
from ingero.agent.health.threshold_choice import AppliedThreshold
from ingero.testing.clock import ManualClock
from ingero.wire.names import DetectionMode, DominantSignal
from ingero.wire.uds import StragglerState, decode_message, encode_message

IDENTITY = NodeIdentity(cluster_id="c", node_id="n1", world_size=8, rank=3)


def test_a_straggler_is_told_with_what_its_workload_said_last():
    said = {"step": "41"}
    ids = itertools.count()
    episodes = NodeEpisodes(IDENTITY, lambda: f"e{next(ids)}", find_labels=lambda: dict(said))
    applied = AppliedThreshold(DetectionMode.FLEET, 0.9)
    episodes.judge(applied, 0.5, DominantSignal.COMPUTE, 1)
    episodes.repeat_state(1)
    said["step"] = "42"
    episodes.repeat_state(2)
    lines = [encode_message(message) for message in episodes.take_messages()]
    assert [json.loads(line)["labels"] for line in lines] == [{"step": "41"}, {"step": "42"}]
    alerts = []
    episodes = Episodes(ManualClock(), alerts.append)
    for line in lines:
        episodes.line(line)
    (alert,) = alerts
    assert alert.details["labels"] == {"step": "41"}  # where it began


def test_a_node_whose_workload_says_nothing_sends_the_existing_agents_line():
    episodes = NodeEpisodes(IDENTITY, lambda: "e")
    episodes.judge(AppliedThreshold(DetectionMode.FLEET, 0.9), 0.5, DominantSignal.COMPUTE, 1)
    episodes.repeat_state(1)
    (message,) = episodes.take_messages()
    assert "labels" not in json.loads(encode_message(message))
    read = decode_message(encode_message(message))
    assert isinstance(read, StragglerState)
    assert read.labels == {}
