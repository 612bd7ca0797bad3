"""Each command of the list, given what cannot be read, written or listened on: one error, the documented status, no traceback."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from ingero.cli.main import COMMANDS, cli, run_program

READ_ONLY = "/sys"
"""A folder in which nobody can make a file, root included."""
FAULTS = {
    "annotate": [
        (2, "--from-file {missing}"),
        (2, "--from-file {folder}"),
        (1, "--label a=b --socket {missing}"),
    ],
    "check": [(1, "--support-bundle {read_only}/b.tgz"), (1, "--support-bundle {folder}/none/b.tgz")],
    "completion": [(2, "nosuch")],
    "config": [(2, "validate {missing}"), (2, "validate {folder}"), (2, "validate {text}"), (2, "validate {db}")],
    "dashboard": [
        (1, "--db {db} --addr 127.0.0.1:{port} --no-tls"),
        (1, "--db {db} --addr 127.0.0.1:{port}"),
        (2, "--db {missing}"),
        (4, "--db {folder}"),
        (4, "--db {text}"),
    ],
    "demo": [(4, "incident --no-gpu --keep {read_only}/k.db"), (2, "incident --no-gpu --keep {text}")],
    "explain": [(4, "--db {missing}"), (4, "--db {folder}"), (4, "--db {text}"), (4, "--db {cut}")],
    "export": [
        (4, "--format perfetto --db {missing} -o {folder}/o"),
        (4, "--format perfetto --db {folder} -o {folder}/o"),
        (4, "--format perfetto --db {db} -o {read_only}/o"),
        (4, "--format perfetto --db {db} -o {folder}/none/o"),
        (2, "--format perfetto --db {db} -o {text}"),
        (2, "--format perfetto --db {db} -o {pipe} --force"),
    ],
    "fleet-push": [
        (2, "--script {folder} --fleet-endpoint http://127.0.0.1:1 --fleet-cluster-id c"),
        (2, "--script {missing} --fleet-endpoint http://127.0.0.1:1 --fleet-cluster-id c"),
        (1, "--stub --remediate --remediate-socket {read_only}/s --fleet-endpoint http://127.0.0.1:1 --fleet-cluster-id c"),
    ],
    "hang": [(1, "{missing}"), (1, "{db}"), (1, "{folder}")],
    "help": [(2, "nosuch")],
    "mcp": [(1, "--db {db} --http 127.0.0.1:{port} --no-tls"), (2, "--db {missing}"), (4, "--db {folder}")],
    "merge": [
        (4, "{missing} -o {folder}/o"),
        (4, "{folder} -o {folder}/o"),
        (4, "{cut} -o {folder}/o"),
        (4, "{db} -o {read_only}/o"),
        (4, "{db} -o {folder}/none/o"),
        (2, "{db} -o {text}"),
        (2, "{db} -o {pipe} --force"),
    ],
    "migrate": [
        (4, "--db-path {missing}"),
        (4, "--db-path {folder}"),
        (4, "--db-path {text}"),
        (4, "--db-path {missing} --dry-run"),
    ],
    "nccl-plugin": [(2, "nosuch")],
    "query": [(4, "--db {missing}"), (4, "--db {folder}"), (4, "--db {text}"), (4, "--db {cut} SELECT_1")],
    "rates": [(2, "show {folder}"), (2, "show {missing}")],
    "replay": [(1, "{missing}"), (1, "{folder}"), (1, "{db}")],
    "sim": [(2, "run nosuch")],
    "trace": [
        (4, "--db {read_only}/r.db -d 1s"),
        (4, "--db {text} -d 1s"),
        (4, "--db {db} -d 1s"),
        (2, "--db {folder} -d 1s"),
        (1, "--no-record --prometheus 127.0.0.1:{port} -d 1s"),
    ],
    "up": [(2, "--fault nosuch"), (2, "--act auto"), (2, "--slurm")],
    "version": [(2, "--nosuch")],
}  # fmt: skip
CASES = [(name, status, line) for name, cases in FAULTS.items() for status, line in cases]


@pytest.fixture
def places(tmp_path, data_dir):
    db = tmp_path / "r.db"
    shutil.copy(data_dir / "agent_dbs/sample-gpu-node-01.db", db)
    (tmp_path / "cut.db").write_bytes(db.read_bytes()[:10_000])
    (tmp_path / "text").write_text("these are notes\n" * 20)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {
            "db": db,
            "cut": tmp_path / "cut.db",
            "text": tmp_path / "text",
            "pipe": tmp_path / "pipe",
            "folder": tmp_path / "folder",
            "missing": tmp_path / "missing",
            "read_only": READ_ONLY,
            "port": taken.getsockname()[1],
        }


def test_every_command_has_its_faults():
    assert set(FAULTS) == set(COMMANDS)


@pytest.mark.parametrize(("name", "status", "line"), CASES)
def test_what_cannot_be_used_is_one_error(name, status, line, places, capsys):
    if name == "trace" and os.geteuid() != 0:
        pytest.skip("trace asks for root first")
    before = {path: path.stat().st_mtime_ns for path in (places["db"], places["text"])}
    arguments = [name, *line.format(**places).split()]
    if name == "trace":  # gives up capabilities for good: not in the process of other tests
        done = subprocess.run(
            [sys.executable, "-m", "ingero", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        code, told = done.returncode, done.stderr
    else:
        code, told = run_program(cli, arguments), capsys.readouterr().err
    assert code == status
    assert "Traceback" not in told
    assert told.count("error: ") + told.count("Error: ") == 1, told
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not list(places["folder"].iterdir())
    assert places["pipe"].is_fifo()
