"""What becomes of a processor's own report that the rest of the pipeline does not take."""

import pytest

from ingero.errors import PermanentError, RetryableError
from ingero.fleet.component import ReportLedger
from ingero.fleet.helpers.downstream import Downstream
from ingero.otlp.names import Signal
from ingero.testing.host import ManualHost
from ingero.wire.episodes import OPEN, STRAGGLER, EpisodeRecord, build_episode_records


class Pipeline:
    """Takes what it gets, or raises."""

    def __init__(self):
        self.error, self.taken = None, []

    def consume(self, batch):
        if self.error is not None:
            raise self.error
        self.taken.append(batch)


class Ledger:
    """Keeps how each report is sent."""

    def __init__(self):
        self.sends = []

    def report(self, cluster_id, said, sender, export):
        self.sends.append(lambda: sender.try_send(export))


def make_report():
    record = EpisodeRecord(incident_id="id", kind=STRAGGLER, state=OPEN, node_id="n1", start_ns=1)
    return build_episode_records({"c": [record]})


@pytest.fixture
def pipeline():
    return Pipeline()


@pytest.fixture
def lost():
    return []


def begin(pipeline, lost, ledger=None):
    host = ManualHost()
    if ledger is not None:
        host.offer(ReportLedger, ledger)
    downstream = Downstream(host.clock, lost.append)
    downstream.begin(host, "nccl")
    downstream.join(Signal.LOGS, pipeline)
    return downstream


def test_with_a_ledger_a_report_is_sent_until_it_is_taken_and_never_lost(pipeline, lost):
    ledger = Ledger()
    downstream = begin(pipeline, lost, ledger)
    downstream.report("c", {"rank 3": "culprit"}, make_report())
    (send,) = ledger.sends
    pipeline.error = RetryableError("the disk of the queue is full")
    assert [send(), send(), lost] == [False, False, []]
    pipeline.error = None
    assert send()
    assert (len(pipeline.taken), lost) == (1, [])


def test_what_is_refused_permanently_is_lost_and_counted_once(pipeline, lost):
    ledger = Ledger()
    downstream = begin(pipeline, lost, ledger)
    downstream.report("c", {"rank 3": "culprit"}, make_report())
    pipeline.error = PermanentError("never")
    assert ledger.sends[0](), "it is not to be sent again"
    assert lost == [1]


@pytest.mark.parametrize("error", [RetryableError("later"), PermanentError("never")])
def test_without_a_ledger_what_is_not_taken_is_lost_and_counted(pipeline, lost, error):
    downstream = begin(pipeline, lost)
    pipeline.error = error
    downstream.report("c", {}, make_report())
    assert lost == [1]
