"""``ingero hang``: names the ranks that never arrived, from Flight Recorder dumps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ingero.cli.render import plural
from ingero.errors import IngeroError

if TYPE_CHECKING:
    import httpx

    from ingero.model.hang import HangReport, HangRoot

CAUSES = {
    "absent": "its host never entered the operation",
    "stuck": "it entered, its peers left, it never did: its device or driver stopped",
    "silent": "no dump of it: the process is gone or cannot answer",
    "stopped": "its process is stopped by a signal, a tracer or the freezer of its cgroup",
    "ended": "its process ended first, by a signal or an error",
    "mismatched": "it entered another operation or another size than the others",
}


VERDICTS = {
    "absent": "never arrived",
    "stuck": "arrived and never left",
    "silent": "is silent",
    "stopped": "is stopped",
    "ended": "ended before the others",
    "mismatched": "does not do what the others do",
}


@click.command("hang")
@click.argument("directory", type=click.Path(path_type=Path), required=False)
@click.option("--fleet", metavar="URL", help="Ask this Fleet's admin endpoint about a live job.")
@click.option("--cluster-id", default="", help="The live job's cluster.")
@click.option(
    "--ranks",
    "n_ranks",
    type=click.IntRange(1, 1_000_000),
    help="How many ranks the job has, where the last ones left no dump.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    directory: Path | None,
    *,
    fleet: str | None,
    cluster_id: str,
    n_ranks: int | None,
    as_json: bool,
) -> int:
    r"""Name the ranks that a hung job waits for.

    DIRECTORY holds PyTorch Flight Recorder dumps, one file per rank, whose names end in the rank; or a saved page
    /fr_trace_json of PyTorch's debug server. Stacks beside them (NAME3.txt of rank 3, or the debug server's
    stacks_*.txt) tell who waits in something that is not recorded. Nothing in a dump is executed: a dump that asks
    for a class is refused.

    With --fleet the answer is about a live job: what its agents see in flight, by Fleet's admin endpoint.

    Exit status: 0 when the question was answered (also when nobody is missing), 1 when a dump cannot be read.

    \b
    Examples:
      ingero hang /tmp/nccl_trace
      ingero hang /tmp/nccl_trace --json | jq .missing_ranks
      ingero hang /tmp/gloo_trace --ranks 8
      ingero hang --fleet http://127.0.0.1:8081 --cluster-id prod
    """
    if (directory is None) == (fleet is None):
        raise click.UsageError("give a DIRECTORY of dumps or --fleet URL")
    if fleet is None and cluster_id:
        raise click.UsageError("--cluster-id goes with --fleet; a DIRECTORY holds one job")
    if fleet is not None and n_ranks is not None:
        raise click.UsageError("--ranks is about a DIRECTORY; Fleet knows the ranks of a live job")
    if fleet is not None:
        return _ask(fleet.rstrip("/"), cluster_id, as_json=as_json)
    assert directory is not None
    from ingero.detect.hang import find_hang
    from ingero.wire.flight_recorder.job import read_job

    report = find_hang(read_job(directory, n_ranks))
    if n_ranks is not None and n_ranks != (n_known := len(report.ranks_known)):
        click.echo(
            f"note: --ranks {n_ranks} is not used: the dumps name {plural(n_known, 'rank')}",
            err=True,
        )
    click.echo(json.dumps(_as_json(report), indent=2) if as_json else _as_text(report))
    return 0


def _ask(admin_url: str, cluster_id: str, *, as_json: bool) -> int:
    import httpx

    from ingero.sim.cluster.ask import ask_hang
    from ingero.web_authorities import WebAuthorities

    if not cluster_id:
        raise click.UsageError("--fleet needs --cluster-id")
    with httpx.Client(timeout=10, verify=WebAuthorities()) as client:
        answer = ask_hang(client, admin_url, cluster_id)
        if answer is None and not _has_hang_page(client, admin_url):
            raise IngeroError(
                "that Fleet has no nccl processor, which is what follows collectives",
                hint="give its logs and metrics pipelines `processors: [nccl]`, as the configuration it ships "
                "with does",
            )
    if answer is None:
        raise IngeroError(
            f"that Fleet knows no live job of cluster {cluster_id!r}",
            hint=f"its clusters: {admin_url}/api/v1/admin/clusters",
        )
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return 0
    for root in answer["roots"]:
        click.echo(
            click.style(
                f"{_name(root)} {VERDICTS.get(root['cause'], 'never arrived')}", fg="red", bold=True
            )
            + f" at operation {root['missing_seq']} of {root['comm']} ({root['cause']});"
            f" {plural(len(root['blocks']), 'rank')} wait for it, the longest {answer['standing_s']:.0f} s:"
            f" {_spans(tuple(root['blocks']))}"
        )
        for line in _describe_why(root.get("diagnosis")):  # absent from a Fleet of before
            click.echo(f"    {line}")
    for circle in answer["deadlocks"]:
        click.echo(_describe_deadlock(circle, answer["waits"]))
    if not answer["roots"] and not answer["deadlocks"]:
        click.echo(_describe_nobody(answer))
    return 0


def _describe_deadlock(circle: list[int], waits: list[dict[str, Any]]) -> str:
    """Which ranks wait for each other, and where each of them stands."""
    title = f"deadlock: ranks {_spans(tuple(sorted(circle)))} wait for each other"
    lines = [click.style(title, fg="red", bold=True)]
    for wait in waits:
        if wait["rank"] in circle:
            waits_for = _spans(tuple(wait["waits_for"]))
            lines.append(
                f"    rank {wait['rank']} waits for {waits_for} in {wait['op']} {wait['seq']} of {wait['comm']}"
            )
    return "\n".join(lines)


def _describe_nobody(answer: dict[str, Any]) -> str:
    """Why Fleet names nobody: no rank waits, or it does not say for whom yet."""
    waiting = tuple(wait["rank"] for wait in answer["waits"])
    if not waiting:
        return "nobody is missing: no rank of this cluster is known to stand still"
    return (
        f"nobody is named: {plural(len(waiting), 'rank')} in an operation,"
        f" the longest for {answer['standing_s']:.0f} s: {_spans(waiting)};"
        " a rank that does not arrive is named when others have waited some seconds for it"
    )


def _describe_why(diagnosis: dict[str, Any] | None) -> Iterator[str]:
    """What the rank's own agent saw it do."""
    if diagnosis is None:
        return
    yield f"why: {diagnosis['summary']}"
    for cause in diagnosis["causes"]:
        yield from cause["evidence"]


def _name(root: dict[str, Any]) -> str:
    job = f" of job {root['job']}" if root["job"] else ""
    return f"rank {root['rank']}{job} on {root['node_id']}"


def _has_hang_page(client: httpx.Client, admin_url: str) -> bool:
    """Whether the Fleet has the page at all; a Fleet that does not list its pages is given the benefit of the doubt."""
    import httpx

    try:
        pages = client.get(f"{admin_url}/api/v1/admin").raise_for_status().json()["pages"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return True
    return "/api/v1/admin/hang" in pages


def _root_json(root: HangRoot) -> dict[str, Any]:
    return {
        "rank": root.rank,
        "cause": root.cause.value,
        "group": {
            "name": root.group.name,
            "says": root.group.description,
            "ranks": list(root.group.ranks),
        },
        "missing_seq": root.missing_seq,
        "last_finished_seq": root.last_left,
        "blocks": list(root.blocks),
    }


def _as_json(report: HangReport) -> dict[str, Any]:
    silent = sorted(set(report.ranks_known) - set(report.ranks_read))
    return {
        "verdict": report.verdict.value,
        "missing_ranks": list(report.missing_ranks),
        "suspects": list(report.suspects),
        "note": report.note,
        "roots": [_root_json(root) for root in report.roots],
        "deadlocks": [list(circle) for circle in report.deadlocks],
        "waits": [
            {
                "rank": wait.rank,
                "op": wait.op.op,
                "group": wait.op.group,
                "seq": wait.op.seq,
                "waits_for": list(wait.waits_for),
            }
            for wait in report.waits
        ],
        "hidden_waits": list(report.hidden_waits),
        "ranks_read": len(report.ranks_read),
        "ranks_known": len(report.ranks_known),
        "ranks_without_dump": silent,
    }


def _as_text(report: HangReport) -> str:
    lines = [
        f"read {plural(len(report.ranks_read), 'rank')} of {len(report.ranks_known)} that the groups name"
    ]
    for root in report.roots:
        group = f"{root.group.description or 'group'} {root.group.name} {list(root.group.ranks)}"
        finished = "unknown" if root.last_left is None else f"operation {root.last_left}"
        lines += [
            "",
            click.style(f"rank {root.rank} {VERDICTS[root.cause.value]}", fg="red", bold=True)
            + f": {CAUSES[root.cause]}",
            f"  missed in      {group}, operation {root.missing_seq}",
            f"  last finished  {finished}",
            f"  blocks         {plural(len(root.blocks), 'rank')}: {_spans(root.blocks)}",
        ]
    lines += [
        "\n"
        + click.style("circle without a root", fg="yellow")
        + f": ranks {_spans(circle)} wait for each other"
        " (operations entered in different orders, or a link that carries nothing)"
        for circle in report.deadlocks
    ]
    lines += ["", *_closing_lines(report)]
    return "\n".join(lines)


def _closing_lines(report: HangReport) -> list[str]:
    """What is known in all, and what to do next."""
    lines = []
    if report.hidden_waits:
        lines.append(
            f"in a wait that is not recorded, by the stacks: {plural(len(report.hidden_waits), 'rank')}:"
            f" {_spans(report.hidden_waits)}"
        )
    if report.note:
        lines.append(report.note)
    if report.verdict == "named":
        lines.append("next: look at the host and device of the named ranks; the others only wait")
        return lines
    if report.verdict == "nobody":
        return [*lines, "nobody hangs: no rank has been in an operation for long"]
    still = (
        f"{plural(len(report.waits), 'rank')} in an operation"
        if report.waits
        else "no rank in a recorded operation"
    )
    lines.append(f"unknown who holds the others: {still}, and nothing read says whom they wait for")
    if report.suspects:
        lines.append(
            f"suspects: ranks {_spans(report.suspects)}; those that are not at fault wait too"
        )
    lines.append(
        "next: put stacks of all ranks beside the dumps (docs/guides/hang.md), or say --ranks if the last left none"
    )
    return lines


def _spans(ranks: tuple[int, ...]) -> str:
    """``(0, 1, 2, 5)`` → ``0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return (
        ", ".join(f"{first}-{last}" if first != last else f"{first}" for first, last in spans)
        or "none"
    )
