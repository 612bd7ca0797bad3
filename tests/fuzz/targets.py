"""What strangers' bytes reach: every decoder, with what uses its result at once."""

from __future__ import annotations

import fcntl
import gzip
import os
import pickle
import sqlite3
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

import cramjam
import msgspec
import numpy as np
import zstandard
from tests.fuzz.grpc_connection import list_grpc
from tests.fuzz.harness import Target
from tests.wire.test_collectives import EXAMPLE, run_of
from tests.wire.test_diagnosis import DIAGNOSIS, PEER_WORK, REQUEST
from tests.wire.test_events import COST, EPISODE, HANG, NOW_NS, VERDICT
from tests.wire.test_progress import ALL as STANDINGS

from ingero.agent.capture.discover.elf import ElfFile, FileBytes
from ingero.agent.capture.kernel.elf import read_headers
from ingero.agent.capture.stacks.unwind_table import UnwindTable
from ingero.agent.collectives.plugin_ring import HEADER, MAGIC, PLACE, RECORD, find_ring
from ingero.agent.events.sink import SinkState
from ingero.agent.inference.engines import SGLANG, VLLM
from ingero.agent.inference.pages import read_page
from ingero.config.acl import parse_acl
from ingero.config.document import parse_document
from ingero.config.model import parse_model
from ingero.detect.hang import find_hang
from ingero.detect.judge import Judge
from ingero.echo.db.rows import Rows
from ingero.echo.ingest.limits import RecordLimits
from ingero.echo.ingest.logs import add_logs
from ingero.echo.ingest.metrics import add_metrics
from ingero.echo.ingest.origin import Origins
from ingero.echo.ingest.spans import add_spans
from ingero.echo.service.config import EchoConfig
from ingero.errors import BadDataError, ConfigError, StoreError
from ingero.fleet.builtin import FACTORIES
from ingero.fleet.config import build_config
from ingero.fleet.jetstream.messages import (
    ClusterAnswers,
    ClusterLedger,
    LoggedPush,
    decode_answers,
    decode_ledger,
    decode_push,
    encode_document,
    encode_push,
)
from ingero.fleet.workers.messages import RelayedPush
from ingero.model.diagnosis import Subject
from ingero.otlp.codec import decode_export, encode_json, encode_protobuf, iter_log_rows
from ingero.otlp.codec.points import iter_points, read_log_entries
from ingero.otlp.names import ContentType, Signal
from ingero.recording.queries.chains import list_stored_chains
from ingero.recording.queries.overview import read_overview
from ingero.recording.queries.transfer import decode_part, encode_part
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.scenarios.loop import Loop
from ingero.recording.store.annotations import read_annotations
from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.reader import load_recording
from ingero.serving.otlp.encodings import ENCODINGS, decompress
from ingero.sim.runner import get_program
from ingero.telemetry.clock import SystemClock
from ingero.wire.annotations import decode_annotation
from ingero.wire.collectives import build_collectives, pack_ops, read_collectives, unpack_ops
from ingero.wire.costs import build_cost_records, is_cost, read_cost
from ingero.wire.diagnosis import (
    DIAGNOSIS_EVENT,
    build_diagnosis,
    build_diagnosis_read,
    parse_request,
    write_request,
)
from ingero.wire.episodes import build_episode_records, is_episode, read_episode
from ingero.wire.flight_recorder.job import read_job
from ingero.wire.hangs import HANG_EVENT, build_hang_records, read_hang
from ingero.wire.peer_work import WORK_EVENT, build_peer_work, build_peer_work_read
from ingero.wire.progress import build_progress, read_progress
from ingero.wire.push import ResourceCache, read_push
from ingero.wire.uds import decode_message
from ingero.wire.verdicts import build_verdict_records, is_verdict, read_verdict

DATA: Final = Path(__file__).parents[1] / "data"
REPOSITORY: Final = Path(__file__).parents[2]
_BOTH: Final = (ContentType.PROTOBUF, ContentType.JSON)
_SPANS: Final = {
    "resourceSpans": [{
        "resource": {"attributes": [{"key": "ingero.cluster.id", "value": {"stringValue": "c"}}]},
        "scopeSpans": [{"spans": [{
            "traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b174", "name": "step",
            "startTimeUnixNano": "1790000000000000000", "endTimeUnixNano": "1790000000100000000",
            "attributes": [{"key": "v", "value": {"doubleValue": 1.5}}], "events": [{"name": "e", "timeUnixNano": "1790000000050000000"}],
            "links": [{"traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b173"}], "status": {"code": 2},
        }]}],
    }],
}  # fmt: skip
_READERS: Final = ((is_verdict, read_verdict), (is_cost, read_cost), (is_episode, read_episode))


def _take_metrics(content_type: str) -> Callable[[bytes], object]:
    """As Fleet and as Echo take them."""
    cache, origins = ResourceCache(), Origins(RecordLimits())

    def take(body: bytes) -> None:
        export = decode_export(body, Signal.METRICS, content_type)
        _ = export.n_items
        read_push(export, cache)
        list(iter_points(export))
        add_metrics(Rows(n_bytes=len(body)), export, origins, "c", NOW_NS)
        encode_protobuf(export)

    return take


def _take_logs(content_type: str) -> Callable[[bytes], object]:
    """As Fleet and as Echo take them; collectives are judged, and conclusions read."""
    origins = Origins(RecordLimits())

    def take(body: bytes) -> None:
        export = decode_export(body, Signal.LOGS, content_type)
        _ = export.n_items
        runs = read_collectives(export).runs
        read_progress(export)
        read_log_entries(
            export, {DIAGNOSIS_EVENT: build_diagnosis_read(), WORK_EVENT: build_peer_work_read()}
        )
        for row in iter_log_rows(export):
            readers = [read for is_one, read in _READERS if is_one(row.event_name)]
            for read in readers + [read_hang] * (row.event_name == HANG_EVENT):
                _try(read, row)
        add_logs(Rows(n_bytes=len(body)), export, origins, "c", NOW_NS)
        encode_protobuf(export)
        if runs:
            judge = Judge()
            judge.observe(runs, 1)
            judge.settle(2, final=True)
            judge.judgements(with_history=True)

    return take


def _try(read: Callable[..., object], row: object) -> None:
    try:
        read(row)
    except BadDataError:
        return


def _take_spans(content_type: str) -> Callable[[bytes], object]:
    origins = Origins(RecordLimits())

    def take(body: bytes) -> None:
        export = decode_export(body, Signal.TRACES, content_type)
        add_spans(Rows(n_bytes=len(body)), export, origins, "c", NOW_NS)
        encode_protobuf(export)

    return take


def _encode_all(exports: list[object], content_type: str) -> tuple[bytes, ...]:
    encode = encode_protobuf if content_type == ContentType.PROTOBUF else encode_json
    return tuple(encode(export) for export in exports)


def _list_otlp() -> list[Target]:
    samples = DATA / "wire_samples"
    metrics = [
        decode_export((samples / f"{name}.json").read_bytes(), Signal.METRICS, ContentType.JSON)
        for name in ("push_active", "push_first_calibrating", "push_straggler", "straggler_event_0")
    ]
    logs = [
        build_collectives([run_of(EXAMPLE)], NOW_NS, late_ns=5), build_progress(STANDINGS, NOW_NS),
        build_diagnosis(DIAGNOSIS, NOW_NS), build_peer_work(PEER_WORK, NOW_NS), build_verdict_records("c", [VERDICT], NOW_NS),
        build_cost_records("c", [COST], NOW_NS), build_episode_records({"c": [EPISODE]}),
        build_hang_records("c", [HANG], NOW_NS),
    ]  # fmt: skip
    spans = [decode_export(msgspec.json.encode(_SPANS), Signal.TRACES, ContentType.JSON)]
    return [
        Target(f"otlp-{name}-{kind.rpartition('/')[2].removeprefix('x-')}", _encode_all(exports, kind), take(kind), (BadDataError,))
        for name, exports, take in (("metrics", metrics, _take_metrics), ("logs", logs, _take_logs), ("traces", spans, _take_spans))
        for kind in _BOTH
    ]  # fmt: skip


def _take_dump(path: Path) -> None:
    """As all that a job wrote."""
    find_hang(read_job(path.parent))


def _list_dumps() -> tuple[bytes, ...]:
    """Of PyTorch with NCCL, pickled, cut to some entries; of PyTorch with Gloo, JSON."""
    whole = pickle.loads((DATA / "flight_recorder/gpu_error_1st/_dump_13").read_bytes())
    small = {**whole, "entries": whole["entries"][-4:]}
    with tarfile.open(DATA / "hangs/dumps.tar.xz") as archive:
        gloo = next(
            file.read()
            for member in archive
            if member.isfile() and (file := archive.extractfile(member)) and member.size < 20_000
        )
    return (
        pickle.dumps(small, protocol=2),
        pickle.dumps({**small, "entries": small["entries"][:1]}),
        gloo,
    )


class _Scratch:
    """A file that is written again for each body."""

    def __init__(self, take: Callable[[Path], object], name: str = "file") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ingero-fuzz-", dir="/dev/shm")
        self._path = Path(self._folder.name) / name
        self._take = take

    def __call__(self, body: bytes) -> None:
        self._path.write_bytes(body)
        self._take(self._path)


def _take_elf(path: Path) -> None:
    with path.open("rb") as file:
        data = FileBytes(file.fileno())
        elf = ElfFile(data)
        names = ["ncclAllReduce", "ncclCommInitRank", "train", "main", "no such"]
        found = elf.find_functions(names)
        elf.find_local(names)
        elf.needs_library("libcudart")
        elf.find_sections([".text", ".eh_frame"])
        table = UnwindTable(data, read_headers(data)[1])
        for address in (0, 2**63, *(elf.find_address(offset) + 8 for offset in found.values())):
            table.find_rule(address)


def _take_ring(path: Path) -> None:
    """As long as a process holds it, which here is this one."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ring = find_ring(path, os.geteuid())
    if ring is not None:
        with ring:
            ring.read()
            ring.read()
            ring.read_communicators()
            ring.count()


def _build_ring() -> bytes:
    header = np.zeros(1, HEADER)
    header["magic"], header["version"], header["n_records"] = MAGIC, 1, 8
    header["record_bytes"], header["n_comms"], header["head"] = RECORD.itemsize, 4, 5
    records = np.zeros(8, RECORD)
    records["stamp"] = [1, 2, 3, 4, 5, 0, 0, 0]
    return header.tobytes() + np.zeros(4, PLACE).tobytes() + records.tobytes()


def _take_fleet_config(body: bytes) -> None:
    build_config(parse_document(body.decode("utf-8", "replace"), environ={}), FACTORIES)


def _take_echo_config(body: bytes) -> None:
    parse_model(EchoConfig, parse_document(body.decode("utf-8", "replace"), environ={}).tree)


def _list_files() -> list[Target]:
    recording = min(DATA.glob("agent_dbs/*.db"), key=lambda file: file.stat().st_size)
    cut = load_recording(recording)
    part = replace(cut, events=cut.events[:20], aggregates=cut.aggregates[:5], histograms=cut.histograms[:5],
                   snapshots=cut.snapshots[:5], coverage=cut.coverage[:5], stacks=dict(list(cut.stacks.items())[:3]))  # fmt: skip
    libraries = get_program().parent
    return [
        Target("recording-part", (encode_part(part),), decode_part, (BadDataError,)),
        Target("recording-file", (_shrink(recording), _build_recording()), _Scratch(_take_recording), (StoreError, BadDataError)),
        Target("flight-recorder", _list_dumps(), _Scratch(_take_dump, "_dump_0"), (BadDataError,)),
        Target("elf", tuple((libraries / name).read_bytes() for name in ("libnccl.so.2", "job")), _Scratch(_take_elf), (BadDataError,)),
        Target("nccl-ring", (_build_ring(),), _Scratch(_take_ring), ()),
    ]  # fmt: skip


def _take_recording(path: Path) -> None:
    """As every command reads it first."""
    load_recording(path, LoadFilter(has_extras=True)).describe_missing()
    read_overview(path)
    read_annotations(path)
    list_stored_chains(path)


def _build_recording() -> bytes:
    """A small one of this version, with a row or more in most tables."""
    with tempfile.TemporaryDirectory(prefix="ingero-fuzz-", dir="/dev/shm") as folder:
        path = Path(folder) / "own.db"
        built = RecordingBuilder("n1")
        Loop(built, 7, "train").steps(2)
        built.rank(7, 0, 2)
        built.snapshot(0, cpu_pct=20.0)
        built.write(path)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("INSERT INTO unwritten VALUES (0, 'n1', 1, 1, 'disk full', 3)")
            connection.execute("INSERT INTO unprobed VALUES (7, 'libx.so', 'why', 1, 0, 'n1')")
            connection.execute(
                "INSERT INTO annotations (timestamp, labels) VALUES (?, ?)", (1 << 60, '{"a":"b"}')
            )
            connection.execute("DELETE FROM ops WHERE rowid % 20")
            connection.commit()
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("PRAGMA page_size = 512")
            connection.execute("VACUUM")
        return path.read_bytes()


def _shrink(recording: Path) -> bytes:
    """A recording with some rows of each table, so that it is small."""
    with closing(sqlite3.connect(":memory:")) as small:
        with closing(sqlite3.connect(recording)) as whole:
            whole.backup(small)
        tables = [
            name for (name,) in small.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        for table in tables:
            if not table.startswith("sqlite_"):
                small.execute(
                    f'DELETE FROM "{table}" WHERE rowid > (SELECT min(rowid) + 5 FROM "{table}")'
                )
        small.commit()
        small.execute("VACUUM")
        return small.serialize()


def _undo(encoding: str) -> Callable[[bytes], object]:
    def take(body: bytes) -> None:
        decompress(body, encoding, 1 << 20)

    return take


def _list_encodings() -> list[Target]:
    """Compressed bodies; what is larger than the limit is refused too, and has its own error."""
    plain = (DATA / "wire_samples/push_active.json").read_bytes()
    packed = {
        "gzip": (gzip.compress(plain),), "zlib": (zlib.compress(plain),), "deflate": (zlib.compress(plain),),
        "zstd": (zstandard.compress(plain),), "snappy": (bytes(cramjam.snappy.compress_raw(plain)),),
        "x-snappy-framed": (bytes(cramjam.snappy.compress(plain)),), "lz4": (bytes(cramjam.lz4.compress(plain)),),
    }  # fmt: skip
    assert set(packed) == set(ENCODINGS)
    return [
        Target(f"encoding-{name}", bodies, _undo(name), (BadDataError,))
        for name, bodies in packed.items()
    ]


def _take_sink_line() -> Callable[[bytes], object]:
    """With what it already knows, and the page that Prometheus gets."""
    state = SinkState(SystemClock(), max_nodes=100)
    stream = state.open_stream()

    def take(body: bytes) -> None:
        state.line(body, stream)
        state.render().encode()

    return take


def _list_lines() -> list[Target]:
    annotation = b'{"labels":{"phase":"eval","step":"12"},"pid":4711,"span_start":1,"span_end":5}'
    text = (
        b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="m"} 3\n'
        b"# TYPE vllm:time_to_first_token_seconds histogram\n"
        b'vllm:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 2\n'
        b'vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 4\n'
        b'vllm:time_to_first_token_seconds_sum{model_name="m"} 0.75\nvllm:time_to_first_token_seconds_count{model_name="m"} 4\n'
    )
    lines = tuple((DATA / "wire_samples/uds_straggler.ndjson").read_bytes().splitlines())
    acl = b"- key_name: a\n  token: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n  allowed_clusters: [c]\n"
    pushed = LoggedPush(
        "east", False, 7, RelayedPush(0, 1, "metrics", "application/json", "", "", None, b"{}" * 20)
    )
    return [
        Target("annotation", (annotation,), decode_annotation, (BadDataError,)),
        Target("socket-line", lines, decode_message, (BadDataError,)),
        Target("sink-line", lines, _take_sink_line(), ()),
        Target("collective-batch", (pack_ops(EXAMPLE), pack_ops(np.repeat(EXAMPLE, 30))), unpack_ops, (BadDataError,)),
        Target("diagnosis-request", (write_request(REQUEST).encode(), write_request(replace(REQUEST, excess_share=0.0, about=Subject.HANG)).encode(), write_request(replace(REQUEST, peers=(1, 3), peers_work=PEER_WORK.rates)).encode()), lambda body: parse_request(body.decode("latin-1")), (BadDataError,)),
        Target("engine-metrics", (text,), lambda body: [read_page(body.decode("utf-8", "replace"), one) for one in (VLLM, SGLANG)], (BadDataError,)),
        Target("bearers-file", (acl,), lambda body: parse_acl(body.decode("utf-8", "replace"), "file"), (ConfigError,)),
        Target("fleet-config", ((REPOSITORY / "src/ingero/fleet/fleet-config.yaml").read_bytes(), (REPOSITORY / "deploy/containers/fleet.yaml").read_bytes()), _take_fleet_config, (ConfigError,)),
        Target("echo-config", (b"db: /tmp/x.db\ninsecure_no_tls: true\nmax_body: 2MiB\ntoken_grace: 1m30s\nallowed_hosts: [a, b]\nrate_per_second: 2.5\n",), _take_echo_config, (ConfigError,)),
        Target("stream-push", (encode_push(pushed), encode_push(msgspec.structs.replace(pushed, cluster_id="x" * 20_000))), decode_push, (BadDataError,)),
        Target("stream-ledger", (encode_document(ClusterLedger({"a": "b"}, {"c": None}, 7)),), lambda body: decode_ledger(body).restore(), (BadDataError,)),
        Target("stream-answers", (encode_document(ClusterAnswers("c", questions={"n": "q"})),), decode_answers, (BadDataError,)),
    ]  # fmt: skip


def list_targets() -> dict[str, Target]:
    """All of them by name."""
    return {
        target.name: target
        for target in (
            *_list_otlp(),
            *_list_encodings(),
            *_list_files(),
            *_list_lines(),
            *list_grpc(),
        )
    }
