"""What `ingero up --slurm` shows of its nodes."""

from ingero.cli.commands.up.show_act import find_verdicts
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
