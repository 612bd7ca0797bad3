"""An agent's answer why a rank is slow, over the wire, to Echo's table of logs."""

import json

from ingero.model.collectives import Rank
from ingero.model.diagnosis import DiagnosedCause, Diagnosis
from ingero.otlp.codec import decode_protobuf, encode_protobuf
from ingero.otlp.names import Signal
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S
from ingero.wire.diagnosis import build_diagnosis


def test_answer_is_kept_with_its_causes(store, take):
    cause = DiagnosedCause("cpu-quota", "out of CPU quota (cgroup)", 0.75, ("a", "b"))
    diagnosis = Diagnosis(id="00" * 8, rank=Rank("c1", "n2", 2), causes=(cause,))
    export = build_diagnosis(diagnosis, ManualClock().wall_ns())
    take(decode_protobuf(encode_protobuf(export), Signal.LOGS))
    with store.open_reader(5 * NS_PER_S) as reader:
        rows = reader.rows("SELECT cluster_id, node_id, event_name, body, attributes FROM logs")
    ((cluster_id, node_id, event, body, attributes),) = rows
    assert (cluster_id, node_id, event) == ("c1", "n2", "ingero.diagnosis")
    assert body == "out of CPU quota (cgroup) (75%)"
    found = json.loads(attributes)
    assert found["ingero.diagnosis.cause"] == "cpu-quota"
    assert found["ingero.diagnosis.causes"][0]["evidence"] == ["a", "b"]
