"""`ingero trace --annotate --fleet URL`: one trace that records, listens to its workload and tells a Fleet."""

import json
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from ingero.model.events import Source
from ingero.wire.collectives import read_collectives

pytestmark = [pytest.mark.kernel, pytest.mark.slow]
INGERO = f"{sys.executable} -m ingero"
STEPS, N_RANKS = 9, 2


def test_a_trace_records_its_workloads_words_and_pushes_its_collectives(collector, tmp_path):
    database, socket = tmp_path / "t.db", tmp_path / "annotate" / "a.sock"
    program = (
        f"{INGERO} annotate --label step=7 --socket {socket} &&"
        f" {INGERO} sim run ranks --ranks {N_RANKS} steps={STEPS} wait_us=300000 &&"
        f" {INGERO} annotate --label step=8 --pid $$ --socket {socket}"
    )
    result = subprocess.run(
        [
            *(sys.executable, "-m", "ingero", "trace", "--json", "--db", database, "--node", "n"),
            *("--annotate", "--annotate-socket", socket),
            *("--fleet", f"http://127.0.0.1:{collector.port}", "--fleet-cluster-id", "c"),
            *("--fleet-push-interval", "1s", "--"),
            *("sh", "-c", program),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    with closing(sqlite3.connect(database)) as connection, connection:
        said = connection.execute(
            "SELECT labels, pid, start_time, node, timestamp FROM annotations ORDER BY timestamp"
        ).fetchall()
        (first, last) = connection.execute(
            "SELECT min(timestamp), max(timestamp) FROM events WHERE source = ?", (Source.NCCL,)
        ).fetchone()
    assert [json.loads(row[0]) for row in said] == [{"step": "7"}, {"step": "8"}]
    assert said[0][1:4] == (0, 0, "n")
    assert said[1][1] > 0
    assert said[1][2] > 0
    assert said[0][4] < first <= last < said[1][4]  # on the recording's own clock
    runs = [run for export in collector.logs for run in read_collectives(export).runs]
    seqs = {}
    for run in runs:
        seqs.setdefault(run.rank.rank, []).extend(run.ops["seq"].tolist())
    assert {rank: sorted(found) for rank, found in seqs.items()} == {
        rank: list(range(1, STEPS + 3)) for rank in range(N_RANKS)
    }, result.stderr + result.stdout[-2000:]
    assert {(run.rank.cluster_id, run.rank.node_id) for run in runs} == {("c", "n")}
    # A machine with other things to do may let a look come late: that is a state, not a loss.
    late = ("note: baseline", "note: state:")
    notes = [line for line in result.stderr.splitlines() if line.startswith("note:")]
    assert [note for note in notes if not note.startswith(late)] == []


def test_old_command_line_of_a_daemonset_traces_and_says_what_has_no_effect(tmp_path):
    log, file = tmp_path / "agent.log", tmp_path / "ingero.yaml"
    file.write_text("agent: {log_level: info}\nprobes: {cuda: true}\n")
    line = (
        f"trace --debug --config {file} --record=false --stack=false --nccl --cluster c --remediate"
        " --annotate-socket-gid 0 --fleet-workload-type training --deadband 1 --heartbeat 5s --py-walker auto"
        f" --inference=false --inference-warmup 30 --inference-phase-classifier off --throttle-poll-interval 5s --log {log} -d 1s --json"
    )
    result = subprocess.run(
        [sys.executable, "-m", "ingero", *line.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["type"] == "incidents"
    warned = [text for text in result.stderr.splitlines() if text.startswith("warning: ")]
    for name in ("agent.log_level", "probes", "--remediate", "--annotate-gid", "--heartbeat", "--py-walker",
                 "--inference-phase-classifier", "--throttle-poll-interval"):  # fmt: skip
        assert sum(name in text for text in warned) == 1, (name, warned)
    assert "--remediate: no effect without --fleet URL" in log.read_text()
