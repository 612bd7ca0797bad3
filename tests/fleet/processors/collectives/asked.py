"""Questions of the processor, and answers to them."""

from ingero.fleet.component import QuestionSource
from ingero.model.collectives import Rank
from ingero.model.counters import WorkRates
from ingero.model.diagnosis import DiagnosedCause, Diagnosis
from ingero.wire.diagnosis import build_diagnosis, parse_request

CAUSE = DiagnosedCause("cpu-quota", "out of CPU quota (cgroup)", 0.75)


def question(judged, node="node3", cluster="c"):
    (source,) = judged.host.find(QuestionSource)
    return parse_request(source.find_question(cluster, node))


def answer(judged, request, **more):
    rank = more.pop("rank", Rank("c", "node3", 3))
    given = {"id": request.id, "rank": rank, "causes": (CAUSE,), **more}
    batch = judged.send(*as_logs(build_diagnosis(Diagnosis(**given), judged.host.clock.wall_ns())))
    return batch.push.n_rejected


def as_logs(export):
    return export.signal, export


def count(judged, outcome):
    return judged.host.read("ingero_fleet_nccl_diagnoses_total", outcome=outcome) or 0


WORK = WorkRates(40, 20e6, 12e6, 5e6, 7e6, is_of_peers=True)
