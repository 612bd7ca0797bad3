"""Sends an Echo what agents, Fleet and a remediator tell of a simulated job and an action on it."""

import json
import time

from tests.detect.acted_jobs import NS, simulate
from tests.echo.service.conftest import push

from ingero.detect.judge import Judge
from ingero.fleet.component import Hardware
from ingero.fleet.processors.collectives.conclusions import Conclusion, VerdictChange
from ingero.fleet.processors.collectives.costs import CostDeltas, build_costs
from ingero.fleet.processors.collectives.rates import Rates, RatesConfig
from ingero.fleet.processors.collectives.verdicts import build_changes
from ingero.otlp.codec import merge_exports
from ingero.otlp.names import Signal
from ingero.remediation.findings import CulpritFinding
from ingero.wire.collectives import build_collectives
from ingero.wire.remediation import RemediationEntry, build_remediation_records

PAID = Hardware("aws", "NVIDIA L4")
RATES = Rates(RatesConfig(providers={"aws": {"NVIDIA L4": 36.0}}))
BEGAN_NS = time.time_ns() - int(3600 * NS)


def tell(echo, plan):
    """Send what agents, Fleet and the remediator send of a job; the evidence is the finding's own."""
    judge, deltas, due_s, evidence, logs, costs = Judge(), CostDeltas(), 10.0, {}, {}, []
    for at_s, run in simulate(plan).reports:
        judge.observe([run], int(at_s * NS))
        logs.setdefault(at_s, []).append(run)
        if at_s < due_s:
            continue
        due_s = at_s + 10
        judge.settle(int(at_s * NS))
        (judgement,) = judge.judgements()
        (history,) = judge.judgements(with_history=True)
        grown, settled = deltas.find_deltas(conclusion(judgement, history), lambda *_: PAID)
        deltas.settle(conclusion(judgement, history), settled)
        costs.append(build_costs("c1", grown, RATES, BEGAN_NS + int(at_s * NS)))
        if at_s <= plan.acted_s and judgement.culprits:
            (verdict,) = judgement.culprits
            if not evidence:
                told = conclusion(judgement, history, [VerdictChange(None, verdict)])
                costs.append(build_changes(told, BEGAN_NS + int(at_s * NS)))
            evidence = CulpritFinding("e1", "c1", "n2", verdict, 0, None).as_json()
    assert evidence
    for at_s, runs in logs.items():
        export = build_collectives(runs, BEGAN_NS + int(at_s * NS))
        assert push(echo, export, signal=Signal.LOGS).status_code == 200
    assert push(echo, merge_exports(costs), signal=Signal.LOGS).status_code == 200
    act(echo, plan.acted_s, json.dumps(evidence))


def conclusion(judgement, history, changes=()):
    return Conclusion(judgement, history, (), tuple(changes), judged_ns=0, alpha=1e-6, generation=1)


def act(echo, acted_s, evidence, action="a1", cluster="c1"):
    entries = [
        RemediationEntry(
            seq=seq, wall_ns=BEGAN_NS + int(at_s * NS), cluster_id=cluster, node_id="n2", entry="action", episode="e1",
            action_id=action, target="host-2", actuator="slurm", state=state, evidence=evidence, clauses="[]",
        )
        for seq, state, at_s in ((1, "begun", acted_s - 1), (2, "done", acted_s), (3, "undone", acted_s + 600))
    ]  # fmt: skip
    assert push(echo, build_remediation_records(entries), signal=Signal.LOGS).status_code == 200
