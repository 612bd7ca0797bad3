"""What `ingero up --slurm` shows of its nodes."""

import pytest

from ingero.cli.commands.up.show_act import _say_checks, find_verdicts
from ingero.cli.main import cli, run_program
from ingero.model.collectives import Rank
from ingero.model.verdicts import Judgement, Verdict, VerdictKind
from ingero.sim.cluster.act_result import ActProgress


def show(nodes, *ranks):
    """The rank that is shown for each node, of these ranks that Fleet knows."""
    progress = ActProgress(nodes=nodes)
    verdicts = [Verdict(Rank("c", node, rank), VerdictKind.VICTIM) for node, rank in ranks]
    progress.watch.judgement = Judgement("c", tuple(verdicts))
    return {node: verdict.rank.rank for node, verdict in find_verdicts(progress).items()}


def test_a_node_that_has_had_two_ranks_is_shown_with_the_one_that_it_has_now():
    before = [("host-0", 0), ("host-1", 1), ("host-2", 2)]
    nodes = {f"host-{number}": "ALLOCATED" for number in range(4)}
    assert show(nodes | {"host-3": "IDLE"}, *before) == {"host-0": 0, "host-1": 1, "host-2": 2}
    after = [("host-0", 0), ("host-1", 1), ("host-2", 1), ("host-2", 2), ("host-3", 2)]
    drained = nodes | {"host-1": "IDLE+DRAIN"}
    expected = {"host-0": 0, "host-1": 1, "host-2": 1, "host-3": 2}
    assert show(drained, *after) == expected
    assert show(drained, *reversed(after)) == expected


def test_nodes_are_counted_by_their_numbers():
    nodes = {f"host-{number}": "ALLOCATED" for number in (10, 9, 8)}
    assert show(nodes, ("host-10", 0), ("host-10", 2)) == {"host-10": 2}


@pytest.mark.parametrize(
    "asked", [("--twin", "without-fault"), ("--echo",), ("--gpu-rate", "2"), ("--currency", "EUR")]
)
def test_what_is_for_slurm_alone_is_refused_without_it(asked, capsys):
    assert run_program(cli, ["up", *asked]) == 2
    assert f"{asked[0]} without --slurm" in capsys.readouterr().err


def test_a_person_reads_what_others_say_of_what_was_saved():
    twins = {
        "without-fault": {"lost_gpu_seconds": 100.0, "estimated_gpu_seconds": 110.0, "off_by_percent": 10.0, "step_ms": 50.0},
        "without-action": {"saved_gpu_seconds": None, "estimated_gpu_seconds": None, "off_by_percent": None, "step_ms": None},
    }  # fmt: skip
    told = {"saved_gpu_seconds": 12.34, "saved_standard_error_gpu_seconds": 1.26, "unknown": None}
    assert list(_say_checks({"echo": told, "twins": twins})) == [
        "Echo: 12.3 ± 1.3 GPU seconds",
        "the same job without fault: 100.0 GPU seconds lost, estimated 110.0 (off by 10.0 %); a step 50.0 ms",
        "the same job without action: not known: too few steps were seen",
    ]
    untold = {"saved_gpu_seconds": None, "unknown": "no run"}
    assert list(_say_checks({"echo": untold})) == ["Echo: not known what it saved: no run"]
    assert list(_say_checks({"echo": None})) == [
        "Echo: not known what it saved: it received no action"
    ]
    assert list(_say_checks({})) == []
