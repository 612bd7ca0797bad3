"""``ingero annotate``: tell the agent of this node what the workload is doing."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ingero.cli.render import plural
from ingero.errors import BadDataError, IngeroError, RetryableError

if TYPE_CHECKING:
    from typing import BinaryIO

    from ingero.wire.annotations import Annotation

CONNECT_TIMEOUT_S = 5.0
PAUSE_S = 1.1
"""Between two seconds' worth of lines: the agent takes no more of one sender."""


@click.command("annotate")
@click.option(
    "--label",
    "-l",
    "labels",
    multiple=True,
    metavar="KEY=VALUE",
    help="What to say; may be repeated. Others on this machine can read it in the process list.",
)
@click.option(
    "--pid",
    type=click.IntRange(min=0),
    default=0,
    help="Of which process; 0 is the whole node.  [default: 0]",
)
@click.option(
    "--from-file",
    "file",
    type=click.File("rb"),
    help="Annotations as JSON lines; - is standard input, which is also read without --label.",
)
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    help="The agent's socket.  [default: /run/ingero/annotate.sock, else ~/.ingero/annotate/annotate.sock]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *, labels: tuple[str, ...], pid: int, file: BinaryIO | None, socket: Path | None, as_json: bool
) -> int:
    r"""Say what the workload is doing: its step, epoch, phase, task_id, run_id, or anything else.

    An agent that was started with --annotate keeps it: in its recording beside the calls of that time, and in what it
    tells of a straggler. Nothing is sent when a line is wrong. The agent answers nothing; what it does not believe,
    such as a label on another user's process, it drops and counts.

    \b
    Examples:
      ingero annotate --label step=1200 --label phase=eval
      ingero annotate --label run_id=r7 --pid 4711
      echo '{"labels": {"step": "1"}, "pid": 4711}' | ingero annotate
    """
    import json

    from ingero.wire.annotations import encode_annotation

    if labels and file is not None:
        raise click.UsageError("--label and --from-file exclude each other")
    if pid and not labels:
        raise click.UsageError("--pid goes with --label; a line of a file names its own pid")
    lines: BinaryIO = file or sys.stdin.buffer
    annotations = [_build(labels, pid)] if labels else list(_read(lines))
    if not annotations:
        raise BadDataError("there is nothing to say: no --label and no line")
    path = socket or _find_socket()
    _send(path, [encode_annotation(one) for one in annotations])
    if as_json:
        click.echo(json.dumps({"sent": len(annotations), "socket": str(path)}))
    else:
        click.echo(f"Sent {plural(len(annotations), 'annotation')} to {path}")
    return 0


def _build(labels: Iterable[str], pid: int) -> Annotation:
    from ingero.wire.annotations import Annotation, check_annotation

    pairs = {}
    for label in labels:
        key, sign, value = label.partition("=")
        if not sign:
            raise click.BadParameter(f"{label!r} is not KEY=VALUE", param_hint="--label")
        pairs[key] = value
    annotation = Annotation(labels=pairs, pid=pid)
    check_annotation(annotation)
    return annotation


def _read(lines: Iterable[bytes]) -> Iterator[Annotation]:
    from ingero.wire.annotations import decode_annotation

    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield decode_annotation(line)
        except BadDataError as error:
            raise BadDataError(f"line {number}: {error.message}") from error


def _find_socket() -> Path:
    from ingero.wire.annotations import SYSTEM_SOCKET, USER_SOCKET

    return SYSTEM_SOCKET if SYSTEM_SOCKET.is_socket() else Path.home() / USER_SOCKET


def _send(path: Path, lines: Iterable[bytes]) -> None:
    import socket
    import time

    from ingero.wire.annotations import LINES_PER_S

    hint = "start the agent with --annotate, or name its socket with --socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_TIMEOUT_S)
        try:
            connection.connect(str(path))
        except PermissionError as error:
            raise IngeroError(
                f"you may not write to {path}",
                hint="the agent admits the members of one group: --annotate-gid",
            ) from error
        except OSError as error:
            raise RetryableError(
                f"no agent takes annotations at {path}: {error.strerror or error}", hint=hint
            ) from error
        try:
            for number, line in enumerate(lines):
                if number and number % LINES_PER_S == 0:
                    time.sleep(PAUSE_S)
                connection.sendall(line)
        except OSError as error:
            raise RetryableError(
                f"the agent at {path} stopped reading: {error.strerror or error}",
                hint="its log says why it ended; try again",
            ) from error
