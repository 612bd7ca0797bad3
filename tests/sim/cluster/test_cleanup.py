"""What outlives a process is cleared when it ends, however it ends."""

import os
import signal
import subprocess
import sys

from ingero.sim.cluster.cleanup import open_cleanup

HOLDER = """
import sys
from ingero.sim.cluster.cleanup import open_cleanup
with open_cleanup() as cleanup:
    cleanup.add("false")
    cleanup.add("sh", "-c", "echo 'cleared it' > " + sys.argv[1])
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_cleanup_clears_in_order_and_past_failures(tmp_path):
    said = tmp_path / "said it's here"
    with open_cleanup() as cleanup:
        cleanup.add("sh", "-c", 'echo first >> "$1"', "sh", str(said))
        cleanup.add("no-such-command")
        cleanup.add("sh", "-c", 'echo second >> "$1"', "sh", str(said))
        assert not said.exists()
    assert said.read_text().split() == ["first", "second"]


def test_cleanup_clears_after_a_process_that_was_killed(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(fifo)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"ready\n"
        holder.send_signal(signal.SIGKILL)
        assert fifo.read_text() == "cleared it\n"


def test_it_needs_no_program_besides_the_shell(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = tmp_path / "it is done"
    with open_cleanup() as cleanup:
        cleanup.add("/bin/sh", "-c", 'echo >"$0"', str(done))
        cleanup.add("/bin/sh", "-c", "exit 1")
        cleanup.add("/bin/sh", "-c", 'echo >>"$0"', str(done))
        assert not done.exists()
    assert done.read_text() == "\n\n"


def test_cleanup_clears_though_the_run_has_no_standard_error(tmp_path):
    done = tmp_path / "done"
    program = (
        "import sys\nfrom ingero.sim.cluster.cleanup import open_cleanup\n"
        "with open_cleanup() as cleanup:\n    cleanup.add('/bin/sh', '-c', 'echo >\"$0\"', sys.argv[1])"
    )
    command = 'exec "$0" -c "$1" "$2" 2>&-'
    subprocess.run(["/bin/sh", "-c", command, sys.executable, program, done], check=True)
    assert done.exists()
