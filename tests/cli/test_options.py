"""Options that are declared as fields of a configuration class."""

from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ingero.cli.commands.fleet_push import FleetPushConfig
from ingero.cli.commands.fleet_push import command as fleet_push
from ingero.cli.main import cli, run_program
from ingero.cli.options import duration, group, option, take_config, with_config
from ingero.units import NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    where: Path | None = option("Where to.", default=None)
    factor: float = option("How much.", default=0.5)
    count: int = option("How often.", default=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str = option("Who.")
    pause: int = duration("How long.", default="5s")
    is_loud: bool = option("Loudly.", "--loud", "-l", default=False)
    labels: tuple[str, ...] = option("Words.", "--label", default=())
    inner: Inner = group(
        "count", "where", count={"help": "How often here.", "names": ("--times",), "default": 7}
    )
    rest: tuple[str, ...] = ()


def run(*args):
    taken = []

    @click.command()
    @with_config(Outer)
    @click.argument("rest", nargs=-1)
    @click.argument("other")
    def command(config, other):
        taken.append((config, other))

    done = CliRunner().invoke(command, args, catch_exceptions=False)
    return done, *taken


def test_what_is_not_given_has_the_default_of_its_field():
    _, (config, other) = run("--name", "n", "a", "b", "x")
    assert other == "x"
    assert config == Outer(
        name="n",
        pause=5 * NS_PER_S,
        is_loud=False,
        labels=(),
        inner=Inner(count=7),
        rest=("a", "b"),
    )


def test_each_field_is_read_as_its_type_says():
    _, (config, _) = run(
        *("--name", "n", "--pause", "2m", "-l", "--label", "a", "--label", "b", "--times", "9"),
        *("--where", "/tmp", "x"),
    )
    assert (config.pause, config.is_loud, config.labels) == (120 * NS_PER_S, True, ("a", "b"))
    assert config.inner == Inner(where=Path("/tmp"), factor=0.5, count=9)


def test_help_shows_a_default_that_is_not_empty_and_only_what_a_group_chose():
    text = run("--help")[0].output
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  -")] == [
        "--name", "--pause", "-l,", "--label", "--times", "--where", "--help",
    ]  # fmt: skip
    assert "Who.  [required]" in text
    assert "How long.  [default: 5s]" in text
    assert "How often here.  [default: 7]" in text
    assert "Loudly.\n" in text
    assert "--factor" not in text


@pytest.mark.parametrize(
    ("given", "description"),
    [((), "Missing option '--name'"), (("--name", "n", "--pause", "5"), "--pause")],
)
def test_what_is_missing_or_wrong_is_named(given, description):
    done, *taken = run(*given, "x")
    assert (done.exit_code, taken) == (2, [])
    assert description in done.output


def test_the_defaults_of_fleet_push_are_those_of_its_configuration():
    needed = ["--fleet-endpoint", "x", "--fleet-cluster-id", "c"]
    parsed = fleet_push.make_context("fleet-push", needed).params
    config = take_config(FleetPushConfig, parsed)
    assert parsed == {}
    assert config.push == type(config.push)(fleet_endpoint="x", fleet_cluster_id="c")
    assert config.remediate == type(config.remediate)()
    assert config.annotate == type(config.annotate)()
    assert config.spans == type(config.spans)()


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_what_is_no_finite_number_is_refused(number):
    @click.command()
    @with_config(Inner)
    def command(config):
        raise AssertionError(config)

    done = CliRunner().invoke(command, ["--factor", number], catch_exceptions=False)
    assert done.exit_code == 2
    assert f"Invalid value for '--factor': {number} is not a number" in done.output


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("replay AR --offline --interval 0s", "--interval"),
        ("replay AR --offline --interval 1ns", "--interval"),
        ("replay AR --offline --speed nan", "--speed"),
        ("replay AR --offline --speed inf", "--speed"),
        ("replay AR --offline --speed -1", "--speed"),
        ("replay AR --gpu-rate nan", "--gpu-rate"),
        ("up --push-interval 0s", "--push-interval"),
        ("up --slurm --gpu-rate inf", "--gpu-rate"),
        ("trace --inference --inference-outlier-ratio nan", "--inference-outlier-ratio"),
        ("trace --inference-scrape-interval 0s", "--inference-scrape-interval"),
        (
            "trace --inference-scrape-redetect-interval 0s",
            "--inference-scrape-redetect-interval",
        ),
        (
            "fleet-push --fleet-endpoint a:1 --fleet-cluster-id c --signal-window 0s",
            "--signal-window",
        ),
    ],
)
def test_a_number_that_cannot_be_meant_is_refused_by_the_name_of_its_option(line, option):
    name, *arguments = line.split()
    with pytest.raises(click.BadParameter) as refused:  # read only: nothing is started
        cli.commands[name].make_context(name, arguments)
    assert refused.value.param is not None
    assert refused.value.param.opts == [option]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("hang DUMPS --cluster-id prod", "--cluster-id goes with --fleet"),
        (
            "hang --fleet http://127.0.0.1:1 --cluster-id prod --ranks 8",
            "--ranks is about a DIRECTORY",
        ),
        ("explain --chains --per-process --db RECORDING", "--chains and --per-process are two"),
        ("replay AR --offline --fleet http://127.0.0.1:1", "--offline pushes to nobody"),
    ],
)
def test_an_option_that_would_be_left_unread_is_refused(data_dir, capsys, wrong, said):
    paths = {
        "DUMPS": data_dir / "flight_recorder/gpu_error_1st",
        "RECORDING": data_dir / "agent_dbs/sample-cluster.db",
    }
    line = [str(paths.get(word, word)) for word in wrong.split()]
    assert run_program(cli, line) == 2
    assert said in capsys.readouterr().err
