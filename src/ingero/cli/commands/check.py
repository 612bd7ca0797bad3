"""``ingero check``: what works on this machine, what does not, and how to repair it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ingero.cli.options import KUBELET_SOCKET_OPTION, PROBE_MODE_OPTION, check_output

if TYPE_CHECKING:
    from ingero.agent.checks.machine import Check
    from ingero.agent.checks.processes import ActiveProcess


@click.command("check")
@PROBE_MODE_OPTION
@KUBELET_SOCKET_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--support-bundle",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write a tar.gz for a bug report; secrets in the environment are left out.",
)
@click.option("--force", is_flag=True, help="Replace the file of --support-bundle if it exists.")
def command(*, as_json: bool, support_bundle: Path | None, force: bool) -> None:
    r"""Look at every prerequisite of tracing; say what a missing one costs and what repairs it.

    It looks with the capabilities that ``ingero trace`` keeps, in the order in which that opens things.

    Then the processes that have CUDA or NCCL loaded now. The exit status is 0 whatever is missing: read ``all_passed``.

    \b
    Examples:
      sudo ingero check
      sudo ingero check --json
      sudo ingero check --support-bundle ingero-support.tar.gz
    """
    from ingero.agent.checks.machine import check_as_traced
    from ingero.agent.checks.processes import find_active

    if support_bundle is not None:
        check_output(support_bundle, is_replaced=force)
    checks = check_as_traced()
    processes = find_active()
    report = {
        "all_passed": all(check.passed for check in checks),
        "checks": [_build_entry(check) for check in checks],
        "processes": [_build_process(process) for process in processes],
    }
    if support_bundle is not None:
        _write_bundle(support_bundle, json.dumps(report, indent=2))
        click.echo(f"wrote {support_bundle}", err=True)
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    width = max(len(check.name) for check in checks)
    for check in checks:
        colour = "green" if check.passed else "red" if check.required else "yellow"
        mark = click.style("ok  " if check.passed else "no  ", fg=colour, bold=True)
        click.echo(f"{mark}{check.name:{width}}  {check.detail}")
        if check.costs:
            click.echo(f"{'':{width + 6}}costs: {check.costs}")
        if check.fix:
            click.echo(f"{'':{width + 6}}fix:   {check.fix}")
    click.echo(f"\nprocesses that have CUDA or NCCL loaded: {len(processes) or 'none'}")
    for process in processes:
        for line in _describe_process(process):
            click.echo(line)


def _describe_process(process: ActiveProcess) -> Iterator[str]:
    from ingero.model.untrusted import clean

    yield f"  pid {process.pid} {clean(process.name)}"
    for library in process.libraries:
        version = f"  (version {library.version})" if library.version else ""
        problem = f"  cannot be probed: {library.problem}" if library.problem else ""
        yield f"    {clean(library.path)}{version}{problem}"
    for path in process.hidden_runtimes:
        yield (
            f"    {clean(path)}  has a CUDA runtime linked in, its names stripped:"
            " only the driver's calls are seen"
        )


def _build_process(process: ActiveProcess) -> dict[str, object]:
    """A process with its libraries; texts that would be empty are left out."""
    libraries = [
        {
            name: text
            for name, text in (
                ("path", library.path), ("version", library.version), ("problem", library.problem),
            )
            if text
        }
        for library in process.libraries
    ]  # fmt: skip
    return {
        "pid": process.pid,
        "name": process.name,
        "libraries": libraries,
        "hidden_runtimes": list(process.hidden_runtimes),
    }


def _build_entry(check: Check) -> dict[str, str | bool]:
    """A check by the field names that existing scripts read; texts that would be empty are left out."""
    texts = {"value": check.detail, "detail": check.costs, "recommendation": check.fix}
    return {
        "name": check.name,
        "pass": check.passed,
        "optional": not check.required,
        **{name: text for name, text in texts.items() if text},
    }


def _write_bundle(path: Path, report: str) -> None:
    import io
    import tarfile

    from ingero import __version__
    from ingero.agent.checks.machine import collect_support_files
    from ingero.config.redact import build_redacted_environment

    files = {
        "check.json": report,
        "version.txt": f"{__version__}\n",
        "environment.txt": build_redacted_environment(),
        **collect_support_files(),
    }
    with tarfile.open(path, "w:gz") as archive:
        for name, text in sorted(files.items()):
            data = text.encode()
            entry = tarfile.TarInfo(f"ingero-support/{name}")
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
