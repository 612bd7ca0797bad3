"""The records of Fleet's conclusions, built and read again in both encodings."""

from dataclasses import replace

import pytest

from ingero.errors import BadDataError
from ingero.otlp.codec import (
    build_attributes,
    decode_export,
    decode_protobuf,
    encode_json,
    encode_protobuf,
    iter_log_rows,
)
from ingero.otlp.names import ContentType, Signal
from ingero.wire.costs import (
    MAX_CHARGE,
    UNATTRIBUTED,
    CostRecord,
    build_cost_records,
    is_cost,
    read_cost,
)
from ingero.wire.episodes import (
    OPEN,
    STRAGGLER,
    EpisodeRecord,
    build_episode_records,
    is_episode,
    read_episode,
)
from ingero.wire.hangs import HANG_EVENT, HangRecord, build_hang_records, read_hang
from ingero.wire.verdicts import VerdictRecord, build_verdict_records, is_verdict, read_verdict

NOW_NS = 1_790_000_000_000_000_123
VERDICT = VerdictRecord(
    kind="culprit",
    before="drag",
    node_id="n",
    rank=3,
    job="j",
    resource=(("slurm.job.id", "7"), ("slurm.node.name", "gpu-1"), ("slurm.step.id", "batch")),
    worker="rank 3 of job j",
    comm="ab",
    reason="why",
    evidence_log10=8.5,
    lost_gpu_ms=2500.5,
    slowdown=1.5,
    victims=("rank 1", "rank 2"),
    summary="rank 3 is slow",
    is_alarm=True,
)
COST = CostRecord(
    gpu_seconds=-1.5,
    attributed=UNATTRIBUTED,
    node_id="n",
    rank=3,
    victim_node_id="m",
    provider="aws",
    gpu_model="L4",
    amount=-0.1,
    currency="EUR",
    summary="waiting",
)
EPISODE = EpisodeRecord(
    incident_id="i",
    kind=STRAGGLER,
    state=OPEN,
    node_id="n",
    start_ns=NOW_NS - 5,
    end_ns=NOW_NS,
    n_events=7,
    in_panic=False,
    active_nodes=9,
    under_threshold=8,
    score=0.25,
    threshold=0.75,
    dominant_signal="cpu",
    summary="n is a straggler",
)
HANG = HangRecord(
    rank=2,
    comm="ab",
    missing_seq=10,
    cause="absent",
    blocks=(0, 1, 3),
    last_finished_seq=9,
    standing_s=4.5,
    node_id="n",
    job="j",
    summary="rank 2 never arrived",
)
BUILDERS = {
    "verdict": (lambda one: build_verdict_records("c", [one], NOW_NS), read_verdict, VERDICT),
    "cost": (lambda one: build_cost_records("c", [one], NOW_NS), read_cost, COST),
    "episode": (lambda one: build_episode_records({"c": [one]}), read_episode, EPISODE),
    "hang": (lambda one: build_hang_records("c", [one], NOW_NS), read_hang, HANG),
}


def rows_of(export, encoding):
    if encoding == "protobuf":
        return list(iter_log_rows(decode_protobuf(encode_protobuf(export), Signal.LOGS)))
    return list(iter_log_rows(decode_export(encode_json(export), Signal.LOGS, ContentType.JSON)))


UIDS = {
    "verdict": (
        "afaa88eb21868de595cf6a43fcb1eef4",
        {"before": "", "kind": "drag", "node_id": "m", "rank": 4, "job": "k", "worker": "w", "comm": "cd",
         "evidence_log10": 8.6},
        {"reason": "other", "victims": (), "lost_gpu_ms": 1.0, "slowdown": 2.0, "summary": "other", "resource": ()},
    ),
    "episode": (
        "190e342cf7a15fe233dab5c9019686b8",
        {"kind": "panic", "node_id": "m", "incident_id": "j", "start_ns": 8, "state": "resolved"},
        {"end_ns": 9, "n_events": 8, "score": 0.5, "summary": "other"},
    ),
    "hang": (
        "4d2576ee699a6fc1c9a65fc35f7321a9",
        {"job": "k", "rank": 3, "comm": "cd", "missing_seq": 11, "standing_s": None},
        {"cause": "stuck", "blocks": (), "node_id": "m", "last_finished_seq": 8, "summary": "other"},
    ),
    "cost": (
        "4f6cd52ccb3b57c312922fc12212f8d0",
        {"node_id": "o", "rank": 4, "victim_node_id": "o", "provider": "gcp", "gpu_model": "H100"},
        {"gpu_seconds": 1.0, "amount": 2.0, "summary": "other"},
    ),
}  # fmt: skip


def uid_of(export):
    (row,) = rows_of(export, "protobuf")
    return row.attributes["log.record.uid"]


@pytest.mark.parametrize("event", BUILDERS)
def test_a_record_has_an_id_of_what_it_is_and_not_of_how_it_says_so(event):
    build, _, record = BUILDERS[event]
    uid, identity, words = UIDS[event]
    assert uid_of(build(record)) == uid, "as every release makes it"
    others = [uid_of(build(replace(record, **{name: value}))) for name, value in identity.items()]
    assert len({uid, *others}) == 1 + len(identity)
    assert {uid_of(build(replace(record, **{name: value}))) for name, value in words.items()} == {
        uid
    }


def test_an_id_is_of_a_cluster_and_of_a_moment_and_an_episode_ends_once():
    assert len({
        uid_of(build_verdict_records(cluster, [VERDICT], at_ns))
        for cluster in ("c", "d")
        for at_ns in (NOW_NS, NOW_NS + 1)
    }) == 4  # fmt: skip
    ends = [
        replace(EPISODE, state=state, end_ns=7 + at)
        for at, state in enumerate(("resolved", "lost"))
    ]
    assert len({uid_of(build_episode_records({"c": [end]})) for end in ends}) == 1


def test_a_charge_that_is_too_large_to_be_added_up_is_not_known():
    for value, read in (
        (MAX_CHARGE, MAX_CHARGE),
        (-MAX_CHARGE, -MAX_CHARGE),
        (1.7e308, None),
        (-2e15, None),
    ):
        sent = CostRecord(gpu_seconds=value, amount=value, currency="EUR")
        (row,) = rows_of(build_cost_records("c", [sent], NOW_NS), "protobuf")
        found = read_cost(row)
        assert (found.gpu_seconds, found.amount, found.currency) == (read, read, "EUR")


@pytest.mark.parametrize("encoding", ["protobuf", "json"])
@pytest.mark.parametrize("event", BUILDERS)
def test_what_is_built_is_read_again(event, encoding):
    build, read, record = BUILDERS[event]
    (row,) = rows_of(build(record), encoding)
    assert read(row) == record
    assert row.event_name.endswith(event)
    assert row.time_unix_nano == NOW_NS
    assert row.resource["ingero.cluster.id"] == "c"
    assert row.scope == ("ingero.fleet", "")


@pytest.mark.parametrize("encoding", ["protobuf", "json"])
@pytest.mark.parametrize("event", ["verdict", "cost", "episode"])
def test_what_is_not_told_is_absent_and_never_zero(event, encoding):
    build, read, record = BUILDERS[event]
    nothing = type(record)()
    (row,) = rows_of(build(nothing), encoding)
    assert read(row) == nothing


@pytest.mark.parametrize("event", ["verdict", "cost", "episode"])
def test_a_value_of_another_type_is_not_told(event):
    build, read, record = BUILDERS[event]
    export = build(record)
    (built,) = export.tree.resource_logs[0].scope_logs[0].log_records
    built.attributes = build_attributes({item.key: {} for item in built.attributes})
    (row,) = rows_of(export, "protobuf")
    kept = {"summary": record.summary} | ({"is_alarm": True} if event == "verdict" else {})
    assert read(row) == type(record)(**kept)


def test_the_end_of_a_hang_says_that_nobody_waits():
    over = replace(HANG, standing_s=None, blocks=())
    (row,) = rows_of(build_hang_records("c", [over], NOW_NS), "protobuf")
    assert (row.severity_text, read_hang(row)) == ("INFO", over)
    assert read_hang(row).is_over


@pytest.mark.parametrize(
    "spoiled",
    [
        {"ingero.rank": "2"},
        {"ingero.collective.comm": ""},
        {"ingero.hang.missing_seq": True},
        {"ingero.hang.state": "over"},
        {"ingero.hang.state": "ended"},
        {"ingero.hang.standing_s": "long"},
    ],
)
def test_a_hang_that_names_nothing_or_contradicts_itself_is_refused(spoiled):
    (row,) = rows_of(build_hang_records("c", [HANG], NOW_NS), "protobuf")
    row.attributes.update(spoiled)
    with pytest.raises(BadDataError, match=next(iter(spoiled)).replace(".", r"\.")):
        read_hang(row)


def test_ranks_that_are_no_numbers_cost_only_themselves():
    (row,) = rows_of(build_hang_records("c", [HANG], NOW_NS), "protobuf")
    row.attributes["ingero.hang.blocks"] = ["1", "-2", "x", "9" * 5000, "٣", "4"]
    assert read_hang(row).blocks == (1, 4)


def test_event_names_of_other_senders_are_told_apart():
    assert is_verdict("acme.verdict")
    assert is_cost("ingero.fleet.cost")
    assert is_episode("acme.incident")
    assert is_episode("episode")
    assert not any(is_it(HANG_EVENT) for is_it in (is_verdict, is_cost, is_episode))
    assert not is_verdict("acme.verdicts")
