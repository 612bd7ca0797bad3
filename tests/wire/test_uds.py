"""The remediation lines: byte-for-byte what consumers of the existing agent read."""

import json

import pytest

from ingero.errors import BadDataError
from ingero.wire.uds import (
    LINE_MAX_BYTES,
    InferenceOutlier,
    Memory,
    Straggle,
    StragglerResolved,
    StragglerState,
    UnknownMessage,
    decode_message,
    encode_message,
    find_rank,
    format_timestamp,
)


def test_recorded_lines_are_reproduced_byte_for_byte(data_dir):
    lines = (data_dir / "wire_samples/uds_straggler.ndjson").read_bytes().splitlines(keepends=True)
    messages = [decode_message(line) for line in lines]
    assert [encode_message(message) for message in messages] == lines
    assert [type(message) for message in messages] == [StragglerState] * 3 + [StragglerResolved]
    assert (messages[0].node_id, messages[0].score) == ("n1", 0.41999999999999993)
    assert find_rank(messages[0]) == 3


def resolved(**optional):
    return StragglerResolved(node_id="n", cluster_id="c", timestamp="t", **optional)


def test_rank_zero_is_written_when_the_world_is_known():
    line = encode_message(resolved(rank=0, world_size=8))
    assert json.loads(line)["rank"] == 0


def test_a_rank_that_an_older_agent_dropped_is_read_as_zero():
    line = b'{"type":"straggler_resolved","node_id":"n","cluster_id":"c","timestamp":"t","world_size":8}'
    message = decode_message(line)
    assert message.rank is None
    assert find_rank(message) == 0


def test_a_job_that_is_not_distributed_has_neither_rank_nor_world_size():
    line = encode_message(resolved())
    assert json.loads(line) == {
        "type": "straggler_resolved",
        "node_id": "n",
        "cluster_id": "c",
        "timestamp": "t",
    }
    assert find_rank(decode_message(line)) is None


def test_type_is_the_first_key_and_empty_optionals_are_absent():
    outlier = InferenceOutlier(
        node_id="n",
        cluster_id="c",
        timestamp="t",
        pid=7,
        step_duration_ns=1,
        baseline_p95_ns=2,
        bucket="2x",
        kv_cache_top_alloc_ages_ms=[5, 3],
    )
    line = encode_message(outlier)
    assert line.startswith(b'{"type":"inference_outlier","node_id":"n"')
    assert list(json.loads(line)) == [
        "type",
        "node_id",
        "cluster_id",
        "timestamp",
        "pid",
        "step_duration_ns",
        "baseline_p95_ns",
        "bucket",
        "kv_cache_top_alloc_ages_ms",
    ]


def test_required_fields_are_written_even_when_zero():
    line = encode_message(
        Memory(
            pid=1,
            gpu_id=0,
            allocated_bytes=0,
            total_vram=0,
            utilization_pct=0.0,
            last_alloc_size=0,
            timestamp_ns=0,
        )
    )
    assert json.loads(line) == {
        "type": "memory",
        "pid": 1,
        "gpu_id": 0,
        "allocated_bytes": 0,
        "total_vram": 0,
        "utilization_pct": 0.0,
        "last_alloc_size": 0,
        "timestamp_ns": 0,
    }


def test_nobody_preempting_is_null():
    line = encode_message(
        Straggle(
            pid=1,
            throughput_drop_pct=50.0,
            sched_switch_count=9,
            preempting_pids=None,
            timestamp_ns=1,
            sustained=False,
        )
    )
    assert b'"preempting_pids":null' in line
    assert decode_message(line).preempting_pids is None


def test_unknown_types_and_fields_are_not_errors():
    assert decode_message(b'{"later":1,"type":"nvlink_flap"}') == UnknownMessage("nvlink_flap")
    line = encode_message(resolved())[:-2] + b',"later":{"x":[1]}}\n'
    assert decode_message(line) == resolved()


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[]", b"3", b"{}", b'{"type":""}', b'{"type":3}', b'{"type":"memory"}',
        b'{"type":"straggler_resolved","node_id":3,"cluster_id":"c","timestamp":"t"}',
        b"\xff\xfe", b'{"type":"x\xff"}', b"[" * 100_000, b" " * (LINE_MAX_BYTES + 1),
    ],
)  # fmt: skip
def test_a_bad_line_is_bad_data(line):
    with pytest.raises(BadDataError):
        decode_message(line)


def test_timestamps_are_what_go_writes():
    assert format_timestamp(1_795_230_276_386_542_555) == "2026-11-21T03:04:36.386542555Z"
    assert format_timestamp(1_795_230_276_386_000_000) == "2026-11-21T03:04:36.386Z"
    assert format_timestamp(1_795_230_276_000_000_000) == "2026-11-21T03:04:36Z"
