"""What Fleet's admin pages say of causes is kept by what each is about."""

import httpx
import pytest
from tests.support import local_http

from ingero.model.collectives import Rank
from ingero.model.verdicts import Judgement, Verdict, VerdictKind, judgement_json
from ingero.sim.cluster.fleets import FleetView
from ingero.sim.cluster.result import Progress


class Fleets:
    """One Fleet that judges."""

    def __init__(self, judgement):
        self.judgement = judgement

    def ask(self, client, cluster_id):
        return "http://fleet", self.judgement

    def find_takeover_s(self):
        return None


def view_of(kinds, causes):
    """A view of a Fleet with verdicts of these kinds, of which the ranks in ``causes`` have an answer."""
    verdicts = tuple(Verdict(Rank("c", f"node{n}", n), kind) for n, kind in enumerate(kinds))
    judgement = Judgement("c", verdicts)
    page = judgement_json(judgement)
    for rank, shown in enumerate(page["verdicts"]):
        shown["diagnosis"] = {"cause": causes[rank]} if rank in causes else None

    def answer(request):
        if request.url.path.endswith("/hang"):
            return httpx.Response(404)
        return httpx.Response(200, json={"clusters": [page]})

    client = local_http.open_client(transport=httpx.MockTransport(answer))
    return FleetView(Fleets(judgement), "c", client)


@pytest.mark.parametrize("kind", [VerdictKind.CULPRIT, VerdictKind.NETWORK, VerdictKind.DRAG])
def test_a_cause_of_who_was_named_stays_its_cause_when_it_is_slow_by_less(kind):
    progress = Progress(named={(1, "culprit"): 5})
    view_of([VerdictKind.ORDINARY, kind], {1: "cpu-quota"}).update(progress)
    assert (progress.diagnoses[1][0], progress.uneven) == ({"cause": "cpu-quota"}, {})


def test_why_peers_are_slow_in_turns_is_kept_apart_and_replaces_nothing():
    progress = Progress()
    view_of([VerdictKind.IMBALANCE_DATA] * 2, {1: "more-computing"}).update(progress)
    assert (progress.diagnoses, progress.uneven[1][0]) == ({}, {"cause": "more-computing"})
    view_of([VerdictKind.ORDINARY, VerdictKind.CULPRIT], {1: "cpu-quota"}).update(progress)
    assert progress.diagnoses[1][0] == {"cause": "cpu-quota"}


def test_nobody_is_asked_for_causes_while_nobody_is_slow():
    progress = Progress()
    view_of([VerdictKind.ORDINARY] * 2, {1: "more-computing"}).update(progress)
    assert (progress.diagnoses, progress.uneven) == ({}, {})
