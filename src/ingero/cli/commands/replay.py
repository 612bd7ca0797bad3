"""``ingero replay``: what the detection says about a recorded training job."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command("replay")
@click.argument("trace")
@click.option("--offline", is_flag=True, help="Judge here, without a Fleet.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(trace: str, *, offline: bool, as_json: bool) -> int:
    r"""Judge a recorded training job and name its slow workers.

    TRACE is a Parquet file of per-operation timings, or the name of a recording that ships with ingero (AR). A file
    meta-NAME.yaml beside trace-NAME.parquet tells how many GPUs a worker has; without it, one.

    Exit status: 0 when the recording was judged, whatever the verdict; 1 when it cannot be read.

    \b
    Examples:
      ingero replay AR --offline
      ingero replay job/trace-X.parquet --offline --json | jq '.verdicts[] | select(.verdict == "culprit")'
    """
    from ingero.cli.replay.offline import judge_trace
    from ingero.cli.replay.render import render_result
    from ingero.cli.replay.result import build_result
    from ingero.traces.packaged import find_packaged
    from ingero.traces.readers import read_trace

    if not offline:
        raise click.UsageError("say --offline: replaying through a Fleet is not built yet")
    path = Path(trace)
    job = read_trace(path if path.exists() else find_packaged(trace) or path)
    result = build_result(job, judge_trace(job))
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return 0
    from rich.console import Console

    render_result(result, Console())
    return 0
