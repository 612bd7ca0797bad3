"""``ingero explain``: why it was slow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ingero.cli.options import database, group, json_switch, option, process_ids, with_config
from ingero.cli.render import plural
from ingero.cli.rolled import open_with_rolled, with_rolled
from ingero.cli.serving import NodesConfig

if TYPE_CHECKING:
    from ingero.recording.queries.explain import AskedNode, ExplainAnswer, NodesAnswer
    from ingero.recording.queries.explanation_answers import (
        GroupCoverage,
        IncidentAnswer,
        WindowAnswer,
    )
    from ingero.recording.queries.operations import OperationAnswer
    from ingero.recording.queries.window import Wanted

COLOURS = {"HIGH": "red", "MEDIUM": "yellow", "LOW": "cyan"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainConfig:
    """The options of ``ingero explain``."""

    db: Path | None = database()
    since: str = option(
        "Only this long before the last event, such as 5m.", default="", metavar="DURATION"
    )
    start: str = option(
        "First moment: RFC 3339 (UTC where it names no zone), a time of day such as 15:40 (of this machine's zone), or"
        " 12s from the first event.",
        "--from",
        default="",
        metavar="TIME",
    )
    end: str = option("Last moment, likewise.", "--to", default="", metavar="TIME")
    last: int = option(
        "Only the newest N events.",
        default=0,
        type=click.IntRange(0),
        show_default=False,
        metavar="N",
    )
    pids: tuple[int, ...] = process_ids()
    per_process: bool = option(
        "Show every operation of every process with percentiles.", default=False
    )
    chains: bool = option(
        "Show the chains that the recording agent stored, unverified; where it stored none, incidents in that shape.",
        default=False,
    )
    annotations: bool = option(
        "Show with each incident what the workload said of itself while it lasted (ingero annotate).",
        default=False,
    )
    timeout: str = option("Wait for a node.", default="30s", metavar="DURATION")
    include_rolled: bool = with_rolled()
    among: NodesConfig = group()
    as_json: bool = json_switch("Print JSON with everything the text shows.")


@click.command("explain")
@with_config(ExplainConfig)
def command(config: ExplainConfig) -> None:
    r"""Say what went wrong in a recording: causes, each with the share of the lost time it explains.

    Nothing is written: the file is opened read-only and is byte-identical afterwards. Times are relative to the
    recording, so an old one needs no flags. "unexplained" is an answer; a healthy recording gives none.

    With --nodes, what every node recorded is explained together, each on its own clock; INGERO_MCP_BEARER_TOKEN is
    sent.

    \b
    Examples:
      ingero explain
      ingero explain --db run.db --json | jq '.incidents[0].causes'
      ingero explain --db run.db --from 10s --to 60s --per-process
      ingero explain --nodes gpu-1:8443,gpu-2:8443 --ca-cert ca.pem --since 5m
    """
    from ingero.config.environment import default_database
    from ingero.recording.queries.explain import explain_file
    from ingero.recording.queries.operations import list_operations
    from ingero.recording.queries.window import Wanted, load_part

    wanted = Wanted(config.since, config.start, config.end, config.pids, config.last)
    has_nodes, as_json = bool(config.among.nodes), config.as_json
    if config.chains and config.per_process:
        raise click.UsageError("--chains and --per-process are two answers: choose one")
    if config.annotations and (has_nodes or config.chains or config.per_process):
        click.echo("note: --annotations shows labels only with incidents of a file", err=True)
    if has_nodes:
        refused = config.db is not None or config.start or config.end or config.chains
        if refused or config.include_rolled or len(config.pids) > 1:
            raise click.UsageError(
                "--nodes takes no --db, --from, --to, --chains or --include-rolled, and at most one --pid"
            )
        _show_nodes(config, wanted)
        return
    path = config.db or default_database()
    with open_with_rolled(path, is_wanted=config.include_rolled) as whole:
        if config.chains:
            _show_chains(whole, wanted, as_json)
        elif config.per_process:
            recording = load_part(whole, wanted)
            _show_operations(list_operations(recording), as_json)
            if missing := recording.describe_missing():
                click.echo(missing, err=True)
        else:
            answer = explain_file(whole, wanted, has_annotations=config.annotations)
            click.echo(_to_json(answer) if as_json else as_text(answer))


def _to_json(answer: object) -> str:
    import msgspec

    return json.dumps(msgspec.json.decode(msgspec.json.encode(answer)), indent=2)


def as_text(answer: ExplainAnswer | NodesAnswer) -> str:
    """An explanation as ``ingero explain`` and ``ingero demo`` print it."""
    window = answer.window
    processes = "1 process" if window.processes == 1 else f"{window.processes} processes"
    head = f"{plural(window.events, 'event')} of {processes} in {_span_text(window)}"
    if window.events < window.events_stored:
        head += f" (of {window.events_stored} in the file)"
    if window.missing:
        head += f"\n{window.missing}"
    if not answer.incidents:
        looked = answer.looked
        reason = f"{len(looked.judged)} rules looked and found nothing"
        if looked.unknown:
            reason += f"; {len(looked.unknown)} could not tell, see below"
        if looked.nothing_recorded:
            reason += (
                f"; {len(looked.nothing_recorded)} had nothing to look at "
                f"({', '.join(looked.nothing_recorded)})"
            )
        if not window.events:
            is_empty = not window.events_stored
            reason = (
                "the recording holds no event" if is_empty else "no event is in what was asked for"
            )
            reason += f": {window.outside}" if window.outside else ""
        lines = [head, *answer.not_probed, "", f"no incident: {reason}"]
        return "\n".join([*lines, *_unknown_lines(answer)])
    counts = {level: sum(i.severity == level for i in answer.incidents) for level in COLOURS}
    summary = ", ".join(f"{n} {level}" for level, n in counts.items() if n)
    return "\n".join([
        f"{head}: {plural(len(answer.incidents), 'incident')} ({summary})",
        *answer.not_probed,
        *(_incident_text(incident) for incident in answer.incidents),
        *_unknown_lines(answer),
    ])


def _span_text(window: WindowAnswer) -> str:
    """The time that was asked for, where it is not all of the recording."""
    if window.asked_s is None:
        return f"{window.duration_s:.3f} s"
    first, last = window.asked_s
    rows = f"{window.duration_s:.3f} s from the first start to the last end"
    return f"the {last - first:.3f} s that were asked for ({rows})"


def _unknown_lines(answer: ExplainAnswer | NodesAnswer) -> list[str]:
    """What could not be decided, and how much of each group of calls has a row."""
    lines = []
    for one in answer.unknown:
        who = f"{one.process} (pid {one.pid})" + (f" on {one.node}" if one.node else "")
        what = f"severity of: {one.title}" if one.title else ", ".join(one.rules)
        lines += [
            "",
            f"{click.style('[UNKNOWN]', fg='magenta')} {what}",
            f"  who       {who}",
            f"  missing   {one.missing}",
            f"  do        {one.how}",
        ]
    groups = [f"{g.group} {_of_calls(g)}" for g in answer.window.coverage]
    return [*lines, *(["", f"rows: {', '.join(groups)}"] if groups else [])]


def _of_calls(group: GroupCoverage) -> str:
    """How many calls of a group have a row, and how many there can have been."""
    if group.at_most is None:
        return f"{group.stored} of {group.seen}"
    return f"{group.stored} of about {group.seen} (at most {group.at_most})"


def _incident_text(incident: IncidentAnswer) -> str:
    level = click.style(f"[{incident.severity}]", fg=COLOURS[incident.severity], bold=True)
    who = f"{incident.process} (pid {incident.pid}" + (
        f", thread {incident.tid})" if incident.tid else ")"
    )
    who += f" on {incident.node}" if incident.node else ""
    who += f", rank {incident.rank}" if incident.rank is not None else ""
    lines = [
        "",
        f"{level} {incident.title}",
        f"  who       {who if incident.pid else incident.node or 'the node'}",
        f"  when      {incident.start_s:.3f} s to {incident.end_s:.3f} s; lost {incident.lost_ms:.1f} ms"
        + (f", {incident.window_share:.1%} of {_watched(incident)}" if incident.pid else ""),
    ]
    for cause in incident.causes:
        lines.append(f"  cause     {cause.share:6.1%}  {cause.name}")
        lines += [f"                    {fact}" for fact in cause.evidence]
    lines += [f"  where     {place}" for place in incident.places]
    lines += _said_lines(incident)
    lines += [f"  not it    {r.name}: {r.why}" for r in incident.ruled_out]
    lines += [f"  do        {step}" for step in incident.fix]
    coverage = incident.coverage
    seen = f" of at least {coverage.seen} seen" if coverage.seen is not None else ""
    if coverage.at_most is not None:
        seen = f" of about {coverage.seen}, at most {coverage.at_most} seen"
    lost = f", {coverage.lost} lost" if coverage.lost is not None else ""
    lines.append(
        f"  data      {coverage.state}: {coverage.stored} rows{seen}{lost}  [{incident.id}]"
    )
    return "\n".join(lines)


def _said_lines(incident: IncidentAnswer) -> list[str]:
    """What the workload said of itself meanwhile."""
    lines = []
    for one in incident.annotations or ():
        labels = " ".join(f"{key}={value}" for key, value in one.labels.items())
        until = f" to {one.end_s:.3f} s" if one.end_s > one.start_s else ""
        whose = f" (pid {one.pid})" if one.pid else ""
        lines.append(f"  said      {labels}{whose} at {one.start_s:.3f} s{until}")
    return lines


def _watched(incident: IncidentAnswer) -> str:
    watched = f"the {incident.watched_ms / 1000:.3g} s it was watched"
    is_capped = incident.watched_ms < 1000 and incident.severity != "HIGH"
    return f"{watched}: too short for HIGH" if is_capped else watched


def _show_chains(path: Path, wanted: Wanted, as_json: bool) -> None:
    import msgspec

    from ingero.model.untrusted import clean_whole
    from ingero.recording.queries.chains import build_chain, list_stored_chains
    from ingero.recording.queries.explain import explain_file
    from ingero.recording.queries.window import find_bounds, find_span

    stored = list_stored_chains(path)
    if stored:
        chains, n_all = list_stored_chains(path, find_bounds(find_span(path), wanted)), len(stored)
        of = f" of {n_all}, those of the time asked for," if len(chains) < n_all else ""
        head = f"{plural(len(chains), 'chain')}{of} stored by the recording agent (not verified by this version)"
        if wanted.pids or wanted.last:
            click.echo(
                "note: --pid and --last choose no stored chains, which name neither", err=True
            )
    else:
        chains = [build_chain(one) for one in explain_file(path, wanted).incidents]
        head = f"no chain stored by the recording agent; {plural(len(chains), 'incident')}"
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(chain) for chain in chains], indent=2))
        return
    click.echo(head)
    for chain in chains:
        node = f"  {chain.node}" if chain.node else ""
        line = f"{chain.detected_at}  [{chain.severity}] {chain.summary}{node}"
        click.echo(clean_whole(line))


def _show_nodes(config: ExplainConfig, wanted: Wanted) -> None:
    from ingero.cli.nodes import ask_parts
    from ingero.recording.queries.explain import explain_nodes
    from ingero.recording.queries.operations import list_operations
    from ingero.recording.queries.transfer import join_parts

    answers = ask_parts(config.among, wanted, config.timeout)
    if config.per_process:
        sent = [(answer.node, answer.body) for answer in answers if not answer.error]
        _show_operations(list_operations(join_parts(sent)), config.as_json, has_nodes=True)
        return
    answer = explain_nodes(answers)
    if config.as_json:
        click.echo(_to_json(answer))
        return
    click.echo(as_text(answer))
    click.echo("\n" + "\n".join(_node_line(node) for node in answer.nodes))


def _node_line(node: AskedNode) -> str:
    """What one node contributed: no answer, no events and no incident are three different things."""
    if node.error:
        return f"{node.address}: no answer, so nothing is known of it: {node.error}"
    sent = plural(node.events or 0, "event") if node.events else "no event"
    if node.events != node.events_stored:
        sent += f" of {node.events_stored} stored"
    names = ", ".join(name for name in node.names if name and name != node.address)
    return (
        f"{node.address}{f' ({names})' if names else ''}: {sent}; clock {node.clock_offset_ms:+.1f} ms"
        f" ± {(node.round_trip_ms or 0) / 2:.1f} ms{f'; {node.missing}' if node.missing else ''}"
    )


def _show_operations(
    operations: list[OperationAnswer], as_json: bool, *, has_nodes: bool = False
) -> None:
    import msgspec

    if as_json:
        rows = [
            msgspec.structs.asdict(op)
            # As the existing agent has them.
            | {
                "avg_ns": round(op.total_ms * 1e6 / op.count) if op.count else 0,
                "max_ns": round(op.max_us * 1e3),
            }
            for op in operations
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    heads = (
        "PID",
        "PROCESS",
        "OPERATION",
        "COUNT",
        "P50 us",
        "P95 us",
        "P99 us",
        "MAX us",
        "WALL%",
    )
    node = f"{'NODE':<16} " if has_nodes else ""
    line = "{:>8}  {:<16} {:<22} {:>9} {:>10} {:>10} {:>10} {:>11} {:>6}".format(*heads)
    click.echo(node + line)
    for op in operations:
        node = f"{op.node[:16]:<16} " if has_nodes else ""
        click.echo(
            f"{node}{op.pid:>8}  {op.process[:16]:<16} {op.op:<22} {op.count:>9} {op.p50_us:>10} {op.p95_us:>10} "
            f"{op.p99_us:>10} {op.max_us:>11} {op.wall_pct:>6}{_basis_text(op)}"
        )


_BASIS = {
    "estimate": "  estimate: {rows} of {count} calls have a row, {exact} were counted",
    "unknown": "  of {rows} rows; calls without one were not counted",
}


def _basis_text(op: OperationAnswer) -> str:
    """Where a line's numbers come from, when it is not every call."""
    return _BASIS.get(op.basis, "").format(rows=op.rows, count=op.count, exact=op.exact)
