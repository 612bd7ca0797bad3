"""The question in an answer's header, and the record that comes back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.model.collectives import Rank
from ingero.model.counters import OTHERS, WorkRates
from ingero.model.diagnosis import (
    DiagnosedCause,
    Diagnosis,
    DiagnosisRequest,
    PeerWork,
    Subject,
    describe_diagnosis,
)
from ingero.model.incidents import RuledOut
from ingero.otlp.codec import (
    decode_export,
    encode_json,
    encode_protobuf,
    iter_log_rows,
    read_log_entries,
)
from ingero.otlp.names import ContentType, Signal
from ingero.wire.diagnosis import (
    DIAGNOSIS_EVENT,
    MAX_CAUSES,
    MAX_RECORDS,
    MAX_TEXT_CHARS,
    build_diagnosis,
    build_diagnosis_read,
    parse_request,
    write_request,
)
from ingero.wire.peer_work import WORK_EVENT, build_peer_work, build_peer_work_read, write_rates

REQUEST = DiagnosisRequest("00112233445566ff", 2, "job \r\n7", 0.25, 1_790_000_000_000_000_123)
DIAGNOSIS = Diagnosis(
    id=REQUEST.id,
    rank=Rank("c", "n", 2, job="7"),
    causes=(DiagnosedCause("cpu-quota", "out of CPU quota (cgroup)", 0.75, ("a", "b")),),
    excess_ns=5_000_000_000,
    window_ns=9_000_000_000,
    n_ops=321,
    ruled_out=(RuledOut("page faults", 0.0, "none"),),
    todo=("raise it",),
)
PEER_WORK = PeerWork(
    REQUEST.id,
    Rank("c", "m", 3, job="7"),
    WorkRates(50, 20e6, 12e6, 5e6, 7e6, 6e6, 0.5, {OTHERS: 0.25}, 2, 5, is_of_peers=True),
)


def read(export, content_type=ContentType.PROTOBUF):
    data = encode_protobuf(export) if content_type is ContentType.PROTOBUF else encode_json(export)
    found = build_diagnosis_read()
    read_log_entries(decode_export(data, Signal.LOGS, content_type), {DIAGNOSIS_EVENT: found})
    return found


@given(st.text(max_size=60), st.integers(-1, 1000), st.floats(0.001, 1.0))
def test_question_comes_back_from_its_header_whatever_the_job_is_called(job, rank, share):
    request = replace(REQUEST, job=job, rank=rank, excess_share=round(share, 4))
    text = write_request(request)
    assert text.isascii()
    assert text.isprintable()
    assert parse_request(text) == request


@pytest.mark.parametrize(
    "more",
    [
        {"peers": (1, 3)},
        {"is_work_asked": True},
        {"peers_work": PEER_WORK.rates},
        {"peers_work": replace(PEER_WORK.rates, n_processors=None, others={})},
        {"peers_work": replace(PEER_WORK.rates, device_ns=7e6)},
        {"about": Subject.WORK, "excess_share": 0.0, "since_ns": 0},
    ],
)
def test_question_comes_back_with_what_it_tells_of_peers(more):
    request = replace(REQUEST, **more)
    assert parse_request(write_request(request)) == request


@pytest.mark.parametrize("about", [one for one in Subject if one])
def test_question_about_something_else_comes_back_and_older_agents_cannot_read_it(about):
    request = replace(REQUEST, excess_share=0.0, about=about)
    text = write_request(request)
    assert parse_request(text) == request
    without = text.replace(f"&about={about.value}", "")
    assert without != text
    assert parse_request(without) is None, "to those who pass over `about` it has no excess"


@pytest.mark.parametrize(
    "text",
    [
        None,
        write_request(replace(REQUEST, about=Subject.HANG)),
        write_request(replace(REQUEST, excess_share=0.0)),
        "",
        "id=12&rank=2&job=&excess=0.5&since_ns=1",
        write_request(REQUEST).replace("rank=2", "rank=99999999999"),
        write_request(REQUEST).replace("excess=0.2500", "excess=nan"),
        write_request(REQUEST).replace("excess=0.2500", "excess=2"),
        write_request(REQUEST).replace("since_ns=", "since_ns=-"),
        write_request(REQUEST) + "&rank=3",
        write_request(REQUEST) + "&a=" + "x" * 1024,
        "&".join(f"a{n}=1" for n in range(99)),
        write_request(replace(REQUEST, job="x" * 257)),
        write_request(REQUEST) + "&about=more",
        write_request(replace(REQUEST, about=Subject.WORK)),
        write_request(REQUEST) + "&peers=1,-2",
        write_request(REQUEST) + "&peers=" + ",".join("123456789"),
        write_request(REQUEST) + "&peers_work=1,2,3",
        write_request(REQUEST) + "&peers_work=50,nan,1,1,1,1,,0,2,0",
        write_request(REQUEST) + "&peers_work=50,1,1,1,1,1,0,0,2,0",
        write_request(REQUEST) + "&peers_work=0,1,1,1,1,1,,0,2,0",
        write_request(REQUEST) + "&peers_work=50,1,1,-1,1,1,,0,2,0",
        write_request(REQUEST) + "&peers_work=50,1,1,1,1,1,,0,2,21",
        write_request(REQUEST) + f"&peers_work={10**400},1,1,1,1,1,,0,2,0",
        write_request(REQUEST) + f"&peers_work=50,1,1,1,1,1,,0,{10**400},0",
    ],
)
def test_question_that_cannot_be_bounded_is_none(text):
    assert parse_request(text) is None


@pytest.mark.parametrize("content_type", [ContentType.PROTOBUF, ContentType.JSON])
@pytest.mark.parametrize(
    "diagnosis",
    [
        DIAGNOSIS,
        replace(DIAGNOSIS, rank=Rank("c", "n", -1)),
        Diagnosis(id=REQUEST.id, rank=Rank("c", "n", 2), declined="busy"),
    ],
)
def test_record_comes_back_as_it_was_built(diagnosis, content_type):
    found = read(build_diagnosis(diagnosis, 5), content_type)
    assert (found.found, found.n_refused) == ([diagnosis], 0)


def test_record_has_a_line_for_people_and_its_first_cause():
    (row,) = iter_log_rows(build_diagnosis(DIAGNOSIS, 5))
    assert row.body == "out of CPU quota (cgroup) (75%)"
    assert row.attributes["ingero.diagnosis.cause"] == "cpu-quota"


def test_what_is_unexplained_comes_with_what_was_seen():
    seen = "asleep, of 242 looks: train.py:9 main (83%)"
    causes = (
        DiagnosedCause("cpu-quota", "out of CPU quota (cgroup)", 0.3, ("by 2 ms",)),
        DiagnosedCause("unexplained", "unexplained", 0.7, (seen,)),
    )
    assert (
        describe_diagnosis(replace(DIAGNOSIS, causes=causes))
        == f"out of CPU quota (cgroup) (30%), unexplained (70%; {seen})"
    )


@pytest.mark.parametrize(
    "bad",
    [
        {"id": "no"},
        {"causes": ()},
        {"declined": "and causes"},
        {"rank": Rank("c", "", 2)},
        {"rank": Rank("c", "n", 1 << 25)},
        {"rank": Rank("c", "n", 2, job="x" * 257)},
        {"excess_ns": -1},
        {"causes": (DiagnosedCause("x" * 99, "a", 0.5),)},
        {"causes": (DiagnosedCause("a", "a", 1.5),)},
        {"causes": (DiagnosedCause("a", "", 0.5),)},
        {"causes": DIAGNOSIS.causes * (MAX_CAUSES + 1)},
    ],
)
def test_record_that_makes_no_sense_is_refused_with_a_reason(bad):
    found = read(build_diagnosis(replace(DIAGNOSIS, **bad), 5))
    assert found.found == []
    assert found.n_refused == 1
    assert found.first_problem


def test_texts_are_cut_and_records_beyond_the_limit_are_refused():
    cause = replace(DIAGNOSIS.causes[0], name="x" * 9999, evidence=("y" * 9999,) * 99)
    found = build_diagnosis_read()
    export = build_diagnosis(replace(DIAGNOSIS, causes=(cause,)), 5)
    for _ in range(MAX_RECORDS + 1):
        read_log_entries(export, {DIAGNOSIS_EVENT: found})
    assert (len(found.found), found.n_refused) == (MAX_RECORDS, 1)
    (shown,) = found.found[0].causes
    assert len(shown.name) == len(shown.evidence[0]) == MAX_TEXT_CHARS
    assert len(shown.evidence) == 16


def test_the_record_says_where_the_worker_runs_as_its_other_records_do():
    place = (("ingero.device.ids", "nvidia.com/gpu=GPU-a"), ("k8s.pod.name", "train-0"))
    export = build_diagnosis(replace(DIAGNOSIS, rank=replace(DIAGNOSIS.rank, resource=place)), 1)
    (resource,) = [entry.resource for entry in export.tree.resource_logs]
    told = {item.key: item.value.string_value for item in resource.attributes}
    assert told.items() >= set(place)


@pytest.mark.parametrize("content_type", [ContentType.PROTOBUF, ContentType.JSON])
@pytest.mark.parametrize("answer", [PEER_WORK, replace(PEER_WORK, rank=Rank("c", "m", -1))])
def test_answer_about_work_comes_back_as_it_was_built(answer, content_type):
    export = build_peer_work(answer, 5)
    data = encode_protobuf(export) if content_type is ContentType.PROTOBUF else encode_json(export)
    found = build_peer_work_read()
    read_log_entries(decode_export(data, Signal.LOGS, content_type), {WORK_EVENT: found})
    assert (found.found, found.n_refused) == ([answer], 0)
    (row,) = iter_log_rows(export)
    assert row.body == "an operation: 5 ms on a processor, 7 ms ready to run and not running"


@pytest.mark.parametrize(
    "forged",
    [
        replace(PEER_WORK, id="short"),
        replace(PEER_WORK, rank=Rank("c", "", 3)),
        replace(PEER_WORK, rank=Rank("c", "m", 1 << 25)),
        replace(PEER_WORK, rates=replace(PEER_WORK.rates, n_ops=0)),
        replace(PEER_WORK, rates=replace(PEER_WORK.rates, n_ops=10**400)),
        replace(PEER_WORK, rates=replace(PEER_WORK.rates, computing_ns=-1e6)),
    ],
)
def test_answer_about_work_that_makes_no_sense_is_refused_and_counted(forged):
    found = build_peer_work_read()
    read_log_entries(build_peer_work(forged, 5), {WORK_EVENT: found})
    assert (found.found, found.n_refused) == ([], 1)
    assert found.first_problem


def test_a_question_with_all_that_it_may_tell_fits_its_header():
    longest = replace(
        REQUEST, job="x" * 256, peers=(1 << 23,) * 8, peers_work=PEER_WORK.rates, rank=1 << 23
    )
    assert parse_request(write_request(longest)) == longest
    assert len(write_rates(PEER_WORK.rates)) < 80
