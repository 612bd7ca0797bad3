"""Senders on a real socket: what is believed, of whom, and what one of them can cost."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ingero.agent.annotations.admission import Admission, Peer
from ingero.agent.annotations.labels import KEPT_NS, LatestLabels
from ingero.agent.annotations.listener import MAX_SENDERS, open_annotations
from ingero.agent.annotations.socket_path import prepare_folder
from ingero.errors import BadDataError, ConfigError
from ingero.testing.clock import ManualClock
from ingero.testing.open_files import no_more_files
from ingero.testing.waiting import wait_until
from ingero.wire.annotations import LINE_MAX_BYTES, LINES_PER_S, Annotation

T0 = 1_767_225_600 * 10**9
SECOND_NS = 10**9


class Taken(list):
    """What was believed."""

    def take(self, admitted):
        self.extend(admitted)


class Node:
    """An open socket and what came of it."""

    def __init__(self, path, serving, clock, taken):
        self.path, self.serving, self.clock, self.taken = path, serving, clock, taken

    @property
    def counts(self):
        return self.serving.counts

    def connect(self):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(self.path))
        connection.settimeout(30)
        return connection

    def say(self, *lines):
        """Say lines on a connection of their own and wait until they were read."""
        before = self.n_seen
        with self.connect() as connection:
            connection.sendall(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        wait_until(lambda: self.n_seen == before + len(lines))

    @property
    def n_seen(self):
        counts = self.counts
        return counts.n_taken + counts.n_rejected + counts.n_throttled


@pytest.fixture
def node(tmp_path):
    clock, taken = ManualClock(wall_ns=T0), Taken()
    path = tmp_path / "annotate" / "a.sock"
    with open_annotations(path, -1, taken.take, clock) as serving:
        yield Node(path, serving, clock, taken)


def start_ticks(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_label_of_the_whole_node_is_dated_by_the_agent_and_names_its_sender(node):
    node.say({"labels": {"step": "7", "phase": "eval"}})
    (one,) = node.taken
    assert (one.wall_ns, one.labels) == (T0, {"step": "7", "phase": "eval"})
    assert (one.pid, one.start_ticks, one.span_end_ns) == (0, 0, 0)
    assert one.peer == (os.getpid(), os.geteuid(), os.getegid())


def test_a_process_is_its_pid_and_start_which_the_agent_reads_itself(node):
    pid = os.getpid()
    ours = start_ticks(pid)
    node.say(
        {"labels": {"a": "1"}, "pid": pid},
        {"labels": {"a": "2"}, "pid": pid, "start_time": ours},
        {"labels": {"a": "3"}, "pid": pid, "start_time": ours + 1},
        {"labels": {"a": "4"}, "pid": 4_000_000_000},
        {"labels": {"a": "5"}, "pid": 1 << 22, "self": True},
    )
    assert [(one.labels["a"], one.pid, one.start_ticks) for one in node.taken] == [
        ("1", pid, ours), ("2", pid, ours), ("5", pid, ours),
    ]  # fmt: skip
    assert node.counts.n_rejected == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to have a process of another user")
def test_root_cannot_label_a_process_of_another_user(node):
    other = subprocess.Popen(
        ["setpriv", "--reuid=65534", "--clear-groups", "cat"], stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: Path(f"/proc/{other.pid}").stat().st_uid == 65534)
        node.say({"labels": {"a": "1"}, "pid": other.pid}, {"labels": {"a": "2"}})
    finally:
        other.stdin.close()
        other.wait()
    assert [one.labels["a"] for one in node.taken] == ["2"]
    assert node.counts.n_rejected == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_user_outside_the_group_cannot_connect(node):
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); print(s.connect_ex(sys.argv[1]))"
    )
    node.path.parent.parent.chmod(0o755)
    result = subprocess.run(
        [*("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
         *("/usr/bin/python3", "-c", program, str(node.path))],
        capture_output=True, text=True, check=True, cwd="/",
    )  # fmt: skip
    assert result.stdout.strip() == str(13), result.stdout  # EACCES


def test_a_step_of_the_wall_clock_does_not_tear_the_recording(node):
    node.clock.advance(SECOND_NS)
    node.clock.step_wall(3600 * SECOND_NS)
    said_ns = node.clock.wall_ns()
    node.say(
        {"labels": {"a": "now"}},
        {"labels": {"a": "then"}, "ts": said_ns - 5},
        {"labels": {"a": "span"}, "span_start": said_ns - 9, "span_end": said_ns - 4},
    )
    now, then, span = node.taken
    assert now.wall_ns == T0 + SECOND_NS
    assert then.wall_ns == T0 + SECOND_NS - 5
    assert (span.span_start_ns, span.span_end_ns) == (T0 + SECOND_NS - 9, T0 + SECOND_NS - 4)


def test_a_flood_is_cut_at_the_rate_and_the_next_second_is_free_again(node):
    with node.connect() as connection:
        connection.sendall(b'{"labels":{"a":"1"}}\n' * (LINES_PER_S + 50))
        wait_until(lambda: node.n_seen == LINES_PER_S + 50)
        assert (len(node.taken), node.counts.n_throttled) == (LINES_PER_S, 50)
        node.say({"labels": {"a": "another sender"}})
        node.clock.advance(SECOND_NS)
        connection.sendall(b'{"labels":{"a":"later"}}\n')
        wait_until(lambda: len(node.taken) == LINES_PER_S + 2)
    assert [one.labels["a"] for one in node.taken[-2:]] == ["another sender", "later"]


def test_a_line_without_end_costs_its_connection_and_nobody_elses(node):
    with node.connect() as quiet, node.connect() as endless:
        endless.sendall(b'{"labels":{"a":"before"}}\n' + b"x" * (LINE_MAX_BYTES + 1))
        assert endless.recv(1) == b""  # ended by the agent
        quiet.sendall(b'{"labels":{"a":"1"}}\n')
        wait_until(lambda: len(node.taken) == 2)
    assert node.counts.n_overlong == 1
    assert [one.labels["a"] for one in node.taken] == ["before", "1"]


def test_a_line_in_pieces_is_one_and_the_last_needs_no_end(node):
    with node.connect() as connection:
        for piece in (b'{"lab', b'els":{"a":', b'"1"}}\n\n{"labels":{"a":"2"}}'):
            connection.sendall(piece)
    wait_until(lambda: len(node.taken) == 2)
    assert [one.labels["a"] for one in node.taken] == ["1", "2"]
    assert node.counts.n_rejected == 0


def test_senders_beyond_the_cap_are_turned_away_and_places_become_free(node):
    connections = [node.connect() for _ in range(MAX_SENDERS)]
    wait_until(lambda: node.serving._n_senders == MAX_SENDERS)
    with node.connect() as extra:
        assert extra.recv(1) == b""
    assert node.counts.build_record()["refused"] == node.counts.n_refused == 1
    connections.pop().close()
    wait_until(lambda: node.serving._n_senders == MAX_SENDERS - 1)
    node.say({"labels": {"a": "1"}})
    for connection in connections:
        connection.close()


def test_a_sender_for_whom_no_descriptor_is_left_waits_and_keeps_no_processor_busy(node):
    node.say({"labels": {"a": "0"}})  # it has what it needs itself
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with no_more_files():
        began_s, used_s = time.monotonic(), time.process_time()
        connection.connect(str(node.path))
        while time.monotonic() < began_s + 1:
            time.sleep(0.1)
        used_s = time.process_time() - used_s
    assert used_s < 0.2
    with connection:
        connection.sendall(b'{"labels":{"a":"1"}}\n')
    wait_until(lambda: node.counts.n_taken == 2)


def test_what_was_said_before_the_end_is_taken(tmp_path):
    taken = Taken()
    with open_annotations(tmp_path / "a.sock", -1, taken.take, ManualClock()) as serving:
        node = Node(tmp_path / "a.sock", serving, None, taken)
        connection = node.connect()
        wait_until(lambda: serving._n_senders == 1)
        connection.sendall(b'{"labels":{"a":"last"}}\n')
    connection.close()
    assert [one.labels["a"] for one in taken] == ["last"]
    assert not (tmp_path / "a.sock").exists()
    assert "ingero-annotate" not in {thread.name for thread in threading.enumerate()}


def test_a_sender_that_cannot_be_seen_cannot_speak_of_itself():
    with pytest.raises(BadDataError, match="cannot be seen"):
        Admission(ManualClock()).admit(Annotation(labels={"a": "1"}, is_self=True), Peer(0, 0, 0))


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written to by others"):
        prepare_folder(tmp_path / "a.sock", -1)


def test_a_folder_behind_a_link_is_refused(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ConfigError, match="a link to one"):
        prepare_folder(tmp_path / "link" / "a.sock", -1)


def test_a_folder_that_the_group_cannot_pass_is_told_and_one_of_ours_it_can(tmp_path):
    (tmp_path / "old").mkdir(mode=0o700)
    assert "chmod o+x" in prepare_folder(tmp_path / "old" / "a.sock", 65532)
    assert not prepare_folder(tmp_path / "new" / "a.sock", 65532)


def test_the_latest_value_of_a_key_holds_until_it_is_old(node):
    clock = node.clock
    latest = LatestLabels(clock)
    node.say(
        {"labels": {"step": "1", "run_id": "r"}},
        {"labels": {"step": "2"}},
        {"labels": {"step": "9"}, "span_start": 1, "span_end": 2},
    )
    latest.take(node.taken)
    assert latest.current() == {"run_id": "r", "step": "2"}
    clock.advance(KEPT_NS)
    assert latest.current() == {"run_id": "r", "step": "2"}
    clock.advance(1)
    assert latest.current() == {}


def test_the_newest_keys_are_kept_when_there_are_too_many(node):
    latest = LatestLabels(node.clock)
    node.say(*({"labels": {f"k{i}": "x"}} for i in range(40)))
    latest.take(node.taken)
    assert set(latest.current()) == {f"k{i}" for i in range(8, 40)}


def test_the_command_says_it_and_the_agent_believes_it(node):
    def annotate(*arguments, say=None):
        return subprocess.run(
            [sys.executable, "-c", "from ingero.cli.main import main; main()", "annotate",
             *arguments, "--socket", str(node.path)],
            input=say, capture_output=True, text=True, check=False,
        )  # fmt: skip

    told = annotate("--label", "step=3", "--label", "note=a=b", "--pid", str(os.getpid()))
    assert (told.returncode, told.stdout) == (0, f"Sent 1 annotation to {node.path}\n")
    piped = annotate("--json", say='{"labels":{"step":"4"}}\n\n{"labels":{"step":"5"}}\n')
    assert json.loads(piped.stdout)["sent"] == 2
    wait_until(lambda: len(node.taken) == 3)
    assert [one.labels for one in node.taken] == [
        {"step": "3", "note": "a=b"}, {"step": "4"}, {"step": "5"},
    ]  # fmt: skip
    assert [one.pid for one in node.taken] == [os.getpid(), 0, 0]
    wrong = annotate(say='{"labels":{"step":"6"}}\n{"labels":{"no good":"7"}}\n')
    assert wrong.returncode == 1
    assert "line 2: label 'no good'" in wrong.stderr
    assert annotate("--label", "nothing").returncode == 2
    assert len(node.taken) == 3  # nothing of a wrong file is sent


def test_the_command_without_an_agent_says_what_to_do(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", "from ingero.cli.main import main; main()", "annotate",
         "--label", "a=1", "--socket", str(tmp_path / "none.sock")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "no agent takes annotations" in result.stderr
    assert "--annotate" in result.stderr
