"""The ``ingero-health-check`` program: what a node's HealthCheckProgram of Slurm runs.

It asks the remediator what is to be done with this node, and does that. It ends within a second with status 0, whatever
happens: slurmd waits for it, starts only after it, and some versions of it register with slurmctld only after status 0.
All work is done by a child, which is killed with all that it started when the time is over: a name that is looked up
and a ``scontrol`` that waits for its controller heed no time limit of ours. Only what is always needed is imported.
Source: slurm.conf(5), HealthCheckProgram; seen with slurmd 22.05: no arguments, no environment but SLURMD_NODENAME,
what is printed is logged at debug2, and as an error where the status is not 0.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import syslog
import time

DEADLINE_S = 0.8
"""From the start of Python's own part; the rest of the second is for its start."""
ANSWER_MAX = 2000
USAGE = """\
Usage: ingero-health-check http://HOST:PORT NODE

For HealthCheckProgram of slurm.conf: do what ingero-remediator, whose `listen` is HOST:PORT, tells Slurm's node NODE.
Ends within a second with status 0; what there is to say goes to standard output and to syslog.
"""
_SIGKILL = 9


def main() -> None:
    """Entry point of the ``ingero-health-check`` console script."""
    begin = time.monotonic()
    if len(sys.argv) != 3 or not sys.argv[1].startswith("http://"):
        sys.stdout.write(USAGE)
        sys.exit(0)
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        _work(write_end, sys.argv[1], sys.argv[2])
    os.close(write_end)
    try:  # noqa: SIM105 - contextlib is not imported yet, and costs as much as all of this
        os.setpgid(child, child)
    except OSError:
        pass  # it did that itself, and has ended
    answer = _read_until(read_end, begin + DEADLINE_S)
    if answer is None:
        answer = f"not done within {DEADLINE_S} s; the node stays as it is"
    os.killpg(child, _SIGKILL)
    if answer:
        syslog.openlog("ingero-health-check", syslog.LOG_PID, syslog.LOG_DAEMON)
        syslog.syslog(syslog.LOG_NOTICE, answer)
        sys.stdout.write(f"ingero: {answer}\n")
    sys.stdout.flush()
    os._exit(0)


def _read_until(read_end: int, deadline: float) -> str | None:
    """What the child said; None when it had not ended by then."""
    answer = b""
    while select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(read_end, ANSWER_MAX)
        if not part:
            return answer.decode("utf-8", "replace")
        answer += part
    return None


def _work(write_end: int, url: str, node: str) -> None:
    """In a group of its own, without what slurmd reads from: a process that cannot be killed then holds up nobody."""
    os.setpgid(0, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    try:
        answer = check_node(url, node)
    except (OSError, ValueError) as error:
        answer = f"no answer of {url}: {error}; the node stays as it is"
    os.write(write_end, answer.encode("utf-8", "replace")[:ANSWER_MAX])
    os._exit(0)


def check_node(url: str, node: str) -> str:
    """Ask what is to be done with the node and do it; what there is to say of it, empty for nothing.

    Raises:
        OSError: The remediator does not answer.
        ValueError: The URL, or what answers, is none of a remediator.
    """
    verb, _, reason = ask(url, f"/node/{node}").partition(" ")
    if verb == "drain":
        return _drain(node, reason)
    if verb == "undrain":
        return _undrain(node, reason)
    if verb not in {"report", "none"}:
        raise ValueError(f"what answers is no ingero-remediator: {verb[:40]!r}")
    return reason


def ask(url: str, path: str) -> str:
    """The line that a page of the remediator has.

    Raises:
        OSError: It does not answer.
        ValueError: The URL is wrong, or the answer is no page.
    """
    host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("should be http://HOST:PORT")
    with socket.create_connection((host.strip("[]"), int(port)), DEADLINE_S) as connection:
        request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
        connection.sendall(request.encode())
        answer = b""
        while part := connection.recv(ANSWER_MAX):
            answer += part
            if len(answer) > 2 * ANSWER_MAX:
                raise ValueError("the answer is too long")
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.split(b"\r\n")[0].split()[1:2] != [b"200"]:
        raise ValueError(f"it answers {head[:40]!r}")
    line = body.decode("utf-8", "replace").strip()
    return "".join(one if one.isprintable() else " " for one in line)


def _drain(node: str, reason: str) -> str:
    from ingero.remediation.slurm_states import is_in_service

    if not reason.startswith("ingero a"):
        raise ValueError(f"the reason names no action: {reason[:40]!r}")
    state, shown = _find_state(node)
    if not is_in_service(state):
        return f"to be drained, but it is {state} already ({shown})"
    _scontrol("update", f"nodename={node}", "state=drain", f"reason={reason}")
    return f"drained: {reason}"


def _undrain(node: str, action: str) -> str:
    _, shown = _find_state(node)
    if not action or not shown.startswith(f"ingero {action} "):
        return f"its drain is not that of {action}: {shown}"
    _scontrol("update", f"nodename={node}", "state=undrain")
    return f"given back: {action} is undone"


def _find_state(node: str) -> tuple[str, str]:
    from ingero.remediation.slurm_states import REASON, STATE

    line = _scontrol("-o", "show", "node", node)
    state, reason = STATE.search(line), REASON.search(line)
    return state[1] if state else "unknown", reason[1] if reason else ""


def _scontrol(*arguments: str) -> str:
    """Its output. Raises OSError when it fails, or is not there."""
    import subprocess

    done = subprocess.run(
        ["scontrol", *arguments], capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise OSError(f"scontrol: {' '.join(done.stderr.split())[:200]}")
    return done.stdout
