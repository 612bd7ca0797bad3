"""Parts of recordings from other nodes, for the commands that work on several at once."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode

import click

from ingero.recording.queries.fanout import clock_line, clock_warnings
from ingero.recording.queries.transfer import decode_part

if TYPE_CHECKING:
    from ingero.cli.serving import NodesConfig
    from ingero.recording.queries.fanout import NodeAnswer
    from ingero.recording.queries.window import Wanted


def ask_parts(among: NodesConfig, wanted: Wanted, timeout: str) -> list[NodeAnswer]:
    """Ask every node for part of its recording.

    Which nodes failed, sent only their newest rows or have a clock that is off is said on stderr, and every clock's
    offset.

    Args:
        among: The nodes and how to reach them.
        wanted: The part: ``since``, ``last`` and at most one pid.
        timeout: Longest wait for one node.

    Raises:
        RetryableError: No node answered.
        ConfigError: An address is not one, or plain HTTP would leave this machine.
    """
    given = {
        "since": wanted.since,
        "last": wanted.last,
        "pid": wanted.pids[0] if wanted.pids else 0,
    }
    asked = urlencode({name: value for name, value in given.items() if value})
    answers, skew_ms = among.ask(f"part?{asked}", None, timeout, decode_part)
    for answer in answers:
        if answer.error:
            click.echo(f"warning: {answer.node}: {answer.error}", err=True)
        elif answer.body.is_truncated:
            rows = f"the newest {len(answer.body.events)} of {answer.body.n_events_stored} events"
            click.echo(f"warning: {answer.node}: {rows}", err=True)
    for warning in clock_warnings(answers, skew_ms):
        click.echo(f"warning: {warning}", err=True)
    click.echo(clock_line(answers), err=True)
    return answers
