"""``ingero demo``: known faults and what is said about them. A demo is one line in `DEMOS`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ingero.cli.options import PROBE_MODE_OPTION, json_switch, option, placed, with_config
from ingero.cli.signals import unwind_on_end

if TYPE_CHECKING:
    from ingero.model.recording import Recording
    from ingero.recording.queries.explain import ExplainAnswer


@dataclass(frozen=True, slots=True)
class Played:
    """What a demo shows.

    Attributes:
        text: For a person.
        lines: The same facts for ``--json``: the demo, its events, its incidents, a summary.
    """

    text: str
    lines: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class OutputForm:
    """How a demo's recording is made.

    Attributes:
        name: For ``--json``: synthetic, simulator or gpu.
        description: For a person.
        record: Records a scenario into a new file; may raise our errors.
    """

    name: str
    description: str
    record: Callable[[str, Path], None]


@dataclass(frozen=True, slots=True)
class Demo:
    """One demo.

    Attributes:
        name: What the user types.
        aliases: Other names for it.
        description: One line for the list.
        play: Plays it; may raise our errors. Gets the path to keep its recording at, or None, and how to make it.
    """

    name: str
    aliases: tuple[str, ...]
    description: str
    play: Callable[[Path | None, OutputForm], Played]


def _make_synthetic() -> OutputForm:
    from ingero.recording.scenarios.catalog import SCENARIOS

    builders = {scenario.name: scenario.build for scenario in SCENARIOS}

    def record(name: str, path: Path) -> None:
        builders[name]().write(path)

    return OutputForm("synthetic", "synthetic recording: no GPU was involved", record)


def _run_simulator() -> OutputForm:
    from ingero.cli.commands.demo.live import find_simulator, record_scenario

    target = find_simulator()
    return OutputForm(
        "simulator", target.description, lambda name, path: record_scenario(name, path, target)
    )


def _run_gpu(libcudart: Path | None) -> OutputForm:
    from ingero.cli.commands.demo.live import find_gpu, record_scenario

    target = find_gpu(libcudart)
    return OutputForm(
        "gpu", target.description, lambda name, path: record_scenario(name, path, target)
    )


def _play_scenario(name: str) -> Callable[[Path | None, OutputForm], Played]:
    """A demo that makes a scenario's recording, reads it back and explains it, as for any recording."""

    def play(keep: Path | None, form: OutputForm) -> Played:
        from tempfile import TemporaryDirectory

        from ingero.cli.commands.explain import as_text
        from ingero.recording.queries.explain import explain_recording
        from ingero.recording.queries.window import Wanted, load_part
        from ingero.recording.scenarios.catalog import SCENARIOS
        from ingero.recording.store.rollover import delete_recording

        (description,) = (scenario.description for scenario in SCENARIOS if scenario.name == name)
        with TemporaryDirectory(prefix="ingero-demo-") as folder:
            path = keep or Path(folder) / "demo.db"
            with ExitStack() as undo:
                undo.callback(delete_recording, path)
                form.record(name, path)
                undo.pop_all()
            recording = load_part(path, Wanted())
        answer = explain_recording(recording)
        head = {
            "type": "demo",
            "name": name,
            "scenario": name,
            "story": description,
            "form": form.name,
            "synthetic": form.name == "synthetic",
        }
        lines = [head, *_event_lines(recording), *_result_lines(name, answer)]
        return Played(f"{description}\n({form.description})\n\n{as_text(answer)}", lines)

    return play


def _event_lines(recording: Recording) -> Iterator[dict[str, Any]]:
    """As ``ingero trace --json`` has them."""
    from ingero.cli.commands.trace.output import build_event_line, iter_rows

    for event in iter_rows(recording.events):
        name = recording.process_names.get((event["node"], event["pid"]))
        yield build_event_line(event) | ({"process_name": name} if name else {})


def _result_lines(name: str, answer: ExplainAnswer) -> Iterator[dict[str, Any]]:
    import msgspec

    facts = msgspec.to_builtins(answer)
    for incident in facts["incidents"]:
        yield {"type": "incident", "demo": name, **incident}
    yield {
        "type": "summary",
        "demo": name,
        "n_incidents": len(facts["incidents"]),
        "window": facts["window"],
    }


def _scenario(name: str, description: str, *aliases: str) -> Demo:
    return Demo(name, aliases, description, _play_scenario(name))


DEMOS: Final[tuple[Demo, ...]] = (
    _scenario("incident", "a slow minute: who took the CPU?"),
    _scenario("cold-start", "a slow first second: contention, or loading?"),
    _scenario("cpu-contention", "more busy threads than CPUs"),
    _scenario("gpu-steal", "two processes on one GPU", "gpu-contention", "contention"),
    _scenario("memcpy-bottleneck", "steps made of copies"),
    _scenario("periodic-spike", "a slow step every 200 calls"),
)
"""Every demo, in the order of ``ingero demo all``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """How a demo is played."""

    probe_mode: None = placed(PROBE_MODE_OPTION)
    no_gpu: bool = option(
        "Use synthetic recordings; this is the default and needs nothing.", default=False
    )
    is_simulated: bool = option(
        "Run it for real on the GPU simulator, traced by the real probes; needs root.",
        "--sim",
        default=False,
    )
    is_gpu: bool = option(
        "Run it for real on this machine's NVIDIA GPU with NVIDIA's own libraries, traced; needs root."
        " Not yet tried on a device.",
        "--gpu",
        default=False,
    )
    libcudart: Path | None = option(
        "With --gpu: the CUDA runtime, 12.8 or later, instead of the newest one that is found.",
        default=None,
        type=click.Path(path_type=Path, dir_okay=False, exists=True, resolve_path=True),
    )
    keep: Path | None = option(
        "Keep the demo's recording in this new file.",
        default=None,
        type=click.Path(path_type=Path, dir_okay=False),
    )
    as_json: bool = json_switch(
        "Print JSON lines: each demo, its events, its incidents, a summary."
    )

    def choose_form(self) -> OutputForm:
        """How the recordings are made.

        Raises:
            click.UsageError: Options exclude each other.
        """
        if self.no_gpu + self.is_simulated + self.is_gpu > 1:
            raise click.UsageError("--no-gpu, --sim and --gpu exclude each other")
        if self.libcudart is not None and not self.is_gpu:
            raise click.UsageError("--libcudart belongs to --gpu")
        if self.is_gpu:
            return _run_gpu(self.libcudart)
        return _run_simulator() if self.is_simulated else _make_synthetic()


@click.command("demo")
@click.argument("name", default="all")
@with_config(DemoConfig)
@unwind_on_end()
def command(name: str, config: DemoConfig) -> None:
    r"""Play a known fault and say what it is.

    NAME is a demo, or "all". Each demo makes a recording as the agent would write it, and the same engine explains it
    that explains yours. With --sim the fault really happens, for some seconds, to a program on the GPU simulator; with
    --gpu to the same program on a GPU.

    \b
    Examples:
      ingero demo incident --no-gpu
      sudo ingero demo incident --sim
      sudo ingero demo incident --gpu
      ingero demo --json | jq -r 'select(.type == "incident") | .title'
      ingero demo gpu-steal --keep steal.db && ingero explain --db steal.db
    """
    chosen = [demo for demo in DEMOS if name in {"all", demo.name, *demo.aliases}]
    if not chosen:
        names = "\n".join(f"  {demo.name:<18} {demo.description}" for demo in DEMOS)
        raise click.UsageError(f"no demo is called {name!r}. There are:\n{names}")
    keep = config.keep
    if keep is not None and (len(chosen) > 1 or keep.exists() or keep.is_symlink()):
        raise click.UsageError("--keep takes one demo and a file that does not exist yet")
    form = config.choose_form()
    for demo in chosen:
        if config.as_json:
            for line in demo.play(keep, form).lines:
                click.echo(json.dumps(line, separators=(",", ":")))
            continue
        click.echo(click.style(f"── {demo.name}: {demo.description} ", bold=True))
        click.echo(demo.play(keep, form).text + "\n")
