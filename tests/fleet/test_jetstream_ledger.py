"""What a judge has reported: written down before a report leaves, confirmed after it. Without a server."""

import asyncio
import logging
from hashlib import sha256

import msgspec
import pytest

from ingero.fleet.jetstream.connection import OvertakenError, StoredDocument
from ingero.fleet.jetstream.ledger import LedgerOfCluster
from ingero.fleet.jetstream.messages import (
    MAX_WRITTEN_BYTES,
    decode_ledger,
    encode_document,
    write_report,
)
from ingero.otlp.codec import iter_log_rows
from ingero.telemetry.clock import SystemClock
from ingero.telemetry.limited import RateLimitedLog
from ingero.wire.record_uids import RECORD_UID
from ingero.wire.verdicts import VerdictRecord, build_verdict_records


class OneDocument:
    """A bucket of one document, without a server."""

    documents = "state"

    def __init__(self):
        self.written, self.revision, self.n_slow = [], 0, 0
        self.n_awaited, self.has_them = 0, asyncio.Event()
        self.log = RateLimitedLog(logging.getLogger("test"), SystemClock())

    async def wait_for(self, n_written):
        self.n_awaited = n_written
        await self.has_them.wait()

    async def read(self, _bucket, _key):
        return StoredDocument(self.written[-1], self.revision) if self.written else None

    async def write(self, _bucket, _key, content, revision):
        if revision != self.revision:
            raise OvertakenError("another Fleet has written since")
        self.written.append(content)
        self.revision += 1
        revision = self.revision
        if len(self.written) == self.n_awaited:
            self.has_them.set()
        if self.n_slow:
            self.n_slow -= 1
            await asyncio.sleep(0.1)  # the answer is on its way for that long
        return revision


async def open_ledger(bucket, is_leased=lambda: True, senders=()):
    by_name = {sender.name: sender for sender in senders}
    ledger = LedgerOfCluster(bucket, "east", is_leased, by_name)
    return ledger, await ledger.open()


def test_a_report_is_sent_between_two_writes_and_again_when_the_second_is_missing():
    async def check():
        bucket, sent = OneDocument(), []
        ledger, said = await open_ledger(bucket)
        assert said == {}
        ledger.report({"rank 3": "drag"}, lambda: sent.append("drag") or True)
        await ledger.settle()
        ledger.report({"rank 3": "culprit"}, lambda: sent.append(len(bucket.written)) or True)
        await ledger.settle()
        assert sent == ["drag", 4], "after the opening, two writes for drag, and its own first"
        before_confirmed = OneDocument()
        before_confirmed.written = bucket.written[:4]
        assert (await open_ledger(before_confirmed))[1] == {"rank 3": "drag"}
        assert (await open_ledger(bucket))[1] == {"rank 3": "culprit"}

    asyncio.run(check())


def test_what_was_said_is_not_said_again_and_what_ended_is_forgotten():
    async def check():
        bucket, sent = OneDocument(), []
        ledger, _ = await open_ledger(bucket)
        for kind in ("culprit", "culprit", None, None, "culprit"):
            ledger.report({"rank 3": kind}, lambda kind=kind: sent.append(kind) or True)
            await ledger.settle()
        assert sent == ["culprit", None, "culprit"]

    asyncio.run(check())


def test_a_fleet_that_ends_while_the_pipelines_take_nothing_leaves_the_report_to_the_next_judge():
    async def check():
        bucket, tried, was_tried = OneDocument(), [], asyncio.Event()
        ledger, _ = await open_ledger(bucket)

        def refuse(kind):
            tried.append(kind)
            was_tried.set()
            return False

        for kind in ("drag", "culprit"):
            ledger.report({"rank 3": kind}, lambda kind=kind: refuse(kind))
        running = asyncio.create_task(ledger.run(0.0))
        await was_tried.wait()
        running.cancel()
        await ledger.settle(is_last=True)
        assert tried == ["drag", "drag"]
        assert (await open_ledger(bucket))[1] == {}

    asyncio.run(check())


def test_reports_about_one_thing_that_waited_together_leave_one_after_the_other():
    """As where a full disk held the first one back until the next came: the end of a verdict was lost by that."""

    async def check():
        bucket, sent = OneDocument(), []
        ledger, _ = await open_ledger(bucket)

        def report(rank, kind):
            def send():
                told = decode_ledger(bucket.written[-1])
                sent.append((rank, kind, told.reported.get(rank), told.restore().get(rank)))
                return True

            ledger.report({rank: kind}, send)

        for kind in ("drag", None, None, "culprit", "culprit"):
            report("rank 3", kind)
            report("rank 4", kind)
        await ledger.settle()
        for rank in ("rank 3", "rank 4"):
            assert [one[1:] for one in sent if one[0] == rank] == [
                ("drag", "drag", None),
                (None, None, "drag"),
                ("culprit", "culprit", None),
            ]
        assert decode_ledger(bucket.written[-1]).restore() == {
            "rank 3": "culprit",
            "rank 4": "culprit",
        }

    asyncio.run(check())


def test_a_report_that_the_pipelines_do_not_take_is_sent_again_and_not_confirmed_before():
    async def check():
        bucket, tried = OneDocument(), []
        ledger, _ = await open_ledger(bucket)

        def send():
            told = decode_ledger(bucket.written[-1])
            tried.append((told.restore(), told.passed_seq))
            ledger.note_passed(40 + len(tried))
            return len(tried) == 3

        ledger.report({"rank 3": "culprit"}, send)
        await ledger.settle()
        assert tried == [({}, 0), ({}, 41), ({}, 42)], "who takes over meanwhile sends it"
        assert decode_ledger(bucket.written[-1]).restore() == {"rank 3": "culprit"}

    asyncio.run(check())


def test_a_judge_that_is_replaced_while_a_report_waits_leaves_it_to_its_heir():
    async def check():
        bucket, sent, heirs = OneDocument(), [], []
        ledger, _ = await open_ledger(bucket)

        async def take_over():
            await asyncio.sleep(0.1)
            heirs.append(await open_ledger(bucket))

        ledger.report({"rank 3": "culprit"}, lambda: sent.append("old"))  # never taken
        await asyncio.gather(ledger.settle(), take_over())
        ((heir, said),) = heirs
        assert (said, ledger.is_open) == ({}, False)
        heir.report({"rank 3": "culprit"}, lambda: sent.append("heir") or True)
        await heir.settle()
        assert sent == ["old", "heir"]

    asyncio.run(check())


def test_a_judge_that_was_replaced_unnoticed_sends_nothing():
    async def check():
        bucket, sent = OneDocument(), []
        ledger, _ = await open_ledger(bucket)
        heir, _ = await open_ledger(bucket)
        ledger.report({"rank 3": "culprit"}, lambda: sent.append("old") or True)
        await ledger.settle()
        assert (sent, ledger.is_open) == ([], False)
        heir.report({"rank 3": "culprit"}, lambda: sent.append("heir") or True)
        await heir.settle()
        assert sent == ["heir"]

    asyncio.run(check())


def test_a_judge_whose_lease_ran_out_while_it_wrote_a_report_down_leaves_that_to_its_heir():
    """As where its process was stopped, or had no processor, between the server's answer and the sending."""

    async def check():
        bucket, sent, holder = OneDocument(), [], ["old"]
        ledger, _ = await open_ledger(bucket, lambda: holder == ["old"])
        ledger.report({"rank 3": "culprit"}, lambda: sent.append("old") or True)
        bucket.n_slow = 1
        settling = asyncio.create_task(ledger.settle())
        await asyncio.sleep(0)
        assert decode_ledger(bucket.written[-1]).pending, "it is written down, and not answered"
        holder[:] = ["heir"]
        heir, said = await open_ledger(bucket)
        heir.report({"rank 3": "culprit"}, lambda: sent.append("heir") or True)
        await asyncio.gather(settling, heir.settle())
        assert (said, sent, ledger.is_open) == ({}, ["heir"], False)

    asyncio.run(check())


def test_a_report_waits_for_a_lease_that_is_renewed_late():
    async def check():
        bucket, sent, answers = OneDocument(), [], [False, False, True]
        ledger, _ = await open_ledger(bucket, lambda: answers.pop(0))
        ledger.report({"rank 3": "culprit"}, lambda: sent.append("culprit") or True)
        await ledger.settle()
        assert (sent, answers) == (["culprit"], [])
        assert decode_ledger(bucket.written[-1]).restore() == {"rank 3": "culprit"}

    asyncio.run(check())


def test_what_was_sent_is_confirmed_although_a_report_after_it_is_not_taken():
    """As where a sending queue had room for one more: the next judge sends only the other."""

    async def check():
        bucket, was_tried = OneDocument(), asyncio.Event()
        ledger, _ = await open_ledger(bucket)

        def refuse():
            was_tried.set()
            return False

        ledger.report({"rank 3": "culprit"}, lambda: True)
        ledger.report({"rank 4": "victim"}, refuse)
        running = asyncio.create_task(ledger.run(0.0))
        await was_tried.wait()
        running.cancel()
        await ledger.settle(is_last=True)
        assert (await open_ledger(bucket))[1] == {"rank 3": "culprit"}
        killed = OneDocument()
        ledger, _ = await open_ledger(killed)
        was_tried.clear()
        ledger.report({"rank 3": "culprit"}, lambda: True)
        ledger.report({"rank 4": "victim"}, refuse)
        running = asyncio.create_task(ledger.run(0.0))
        await asyncio.wait_for(killed.wait_for(3), 10)
        running.cancel()
        assert (await open_ledger(killed))[1] == {"rank 3": "culprit"}

    asyncio.run(check())


def test_what_a_release_that_does_not_know_them_carried_along_is_no_report_of_it():
    """As after a rollback: the older release charged what waiting cost, and did not write up to where."""

    async def check():
        bucket = OneDocument()
        ledger, _ = await open_ledger(bucket)
        newer = {"cost": "7000", "panic began": "5", "straggler n1": '["a", 5]'}
        both = {'verdict ["n1", "", 3]': "culprit", "panic": "open", "episode a": "open"}
        for about, state in (newer | both).items():
            ledger.report({about: state}, lambda: True)
        await ledger.settle()
        assert (await open_ledger(bucket))[1] == newer | both
        written = msgspec.msgpack.decode(bucket.written[-1])
        known = {"said", "pending", "passed_seq", "version"}
        older = {name: value for name, value in written.items() if name in known}
        bucket.written.append(msgspec.msgpack.encode(older))
        for _ in range(2):
            assert (await open_ledger(bucket))[1] == both

    asyncio.run(check())


class Sender:
    """Takes every report, and keeps what it says."""

    def __init__(self, name="nccl"):
        self.name, self.taken = name, []

    def try_send(self, export):
        self.taken.append(export)
        return True

    @property
    def records(self):
        return [
            (row.attributes["ingero.verdict.kind"], row.time_unix_nano, row.attributes[RECORD_UID])
            for export in self.taken
            for row in iter_log_rows(export)
        ]


def build_verdict(kind, wall_ns, **more):
    return build_verdict_records("east", [VerdictRecord(kind=kind, rank=3, **more)], wall_ns)


def note(ledger, sender, state, export, about="rank 3"):
    """What the judge of a stream does with a report."""
    reported = {about: state}
    written = write_report(sender.name, reported, export)
    ledger.report(reported, lambda: sender.try_send(export), written)
    return written


async def kill_after_sending(n_writes, state, export):
    """What a judge has sent and written that ended before a write of its ledger."""
    bucket, old = OneDocument(), Sender()
    ledger, _ = await open_ledger(bucket)
    note(ledger, old, "culprit", build_verdict("culprit", 100))
    await ledger.settle()
    note(ledger, old, state, export)
    await ledger.settle()
    bucket.written = bucket.written[:n_writes]
    bucket.revision = n_writes
    return bucket, old


def test_what_a_killed_judge_sent_and_did_not_confirm_is_sent_again_as_it_was_and_ends():
    """The onset may have left: its end has to follow, although the next judge finds nobody at fault."""

    async def check():
        bucket, old = await kill_after_sending(2, None, build_verdict("ordinary", 200))
        heir = Sender()
        ledger, said = await open_ledger(bucket, senders=[heir])
        assert said == {"rank 3": "culprit"}, "it may have left, so it can end"
        note(ledger, heir, "culprit", build_verdict("culprit", 150))
        note(ledger, heir, None, build_verdict("ordinary", 300))
        await ledger.settle()
        assert heir.records[0] == old.records[0], "with its time and its id"
        assert [kind for kind, _, _ in heir.records] == ["culprit", "ordinary"]
        assert (await open_ledger(bucket, senders=[Sender()]))[1] == {}

    asyncio.run(check())


def test_an_end_that_was_not_confirmed_is_sent_again_before_what_begins_anew():
    async def check():
        bucket, old = await kill_after_sending(4, None, build_verdict("ordinary", 200))
        heir = Sender()
        ledger, said = await open_ledger(bucket, senders=[heir])
        assert said == {}
        note(ledger, heir, "culprit", build_verdict("culprit", 300))
        await ledger.settle()
        assert [one[:2] for one in heir.records] == [("ordinary", 200), ("culprit", 300)]
        assert heir.records[0] == old.records[1]
        assert decode_ledger(bucket.written[-1]).restore() == {"rank 3": "culprit"}

    asyncio.run(check())


def test_a_report_waits_in_the_ledger_over_judges_that_do_not_come_to_send_it():
    async def check():
        bucket, old = await kill_after_sending(2, None, build_verdict("ordinary", 200))
        for _ in range(2):
            await open_ledger(bucket, senders=[Sender()])
        heir = Sender()
        ledger, said = await open_ledger(bucket, senders=[heir])
        await ledger.settle()
        assert (said, heir.records) == ({"rank 3": "culprit"}, old.records[:1])
        assert decode_ledger(bucket.written[-1]).written == []

    asyncio.run(check())


@pytest.mark.parametrize("senders", [[], [Sender("ingero")]])
def test_without_who_sends_it_the_next_judge_goes_on_from_what_was_said_before(senders):
    async def check():
        bucket, _ = await kill_after_sending(2, None, build_verdict("ordinary", 200))
        assert (await open_ledger(bucket, senders=senders))[1] == {}
        assert not senders or senders[0].taken == []

    asyncio.run(check())


def test_a_report_that_cannot_be_read_is_not_sent_again():
    async def check():
        bucket, _ = await kill_after_sending(2, None, build_verdict("ordinary", 200))
        document = decode_ledger(bucket.written[-1])
        for content in (b"", b"no zstd", document.written[0].content[:-3]):
            document.written[0].content = content
            bucket.written[-1] = encode_document(document)
            heir = Sender()
            copy = OneDocument()
            copy.written, copy.revision = list(bucket.written), bucket.revision
            ledger, said = await open_ledger(copy, senders=[heir])
            await ledger.settle()
            assert (said, heir.taken) == ({}, [])

    asyncio.run(check())


def test_a_report_too_large_for_the_ledger_is_sent_and_left_to_the_next_judge():
    async def check():
        bucket, sender = OneDocument(), Sender()
        ledger, _ = await open_ledger(bucket)
        victims = tuple(sha256(str(at).encode()).hexdigest() for at in range(20_000))
        export = build_verdict("culprit", 100, victims=victims)
        assert note(ledger, sender, "culprit", export) is None
        await ledger.settle()
        assert sender.taken == [export]
        bucket.written, bucket.revision = bucket.written[:2], 2
        assert (await open_ledger(bucket, senders=[Sender()]))[1] == {}

    asyncio.run(check())


MAX_PAYLOAD = 1 << 20
"""What a NATS server takes, unless it is configured otherwise."""


def name(rank):
    return f'verdict ["gpu-node-{rank:05}.training.example", "llama-70b-4711", {rank}]'


async def report_each(ledger, ranks, kind, sent):
    for rank in ranks:
        ledger.report({name(rank): kind}, lambda rank=rank: sent.append((rank, kind)) or True)
    await ledger.settle()


def test_every_end_is_sent_once_although_more_is_open_than_the_document_holds():
    async def check():
        bucket, sent, ranks = OneDocument(), [], range(1, 20_001)
        ledger, _ = await open_ledger(bucket)
        await report_each(ledger, [0], "culprit", sent)
        await report_each(ledger, ranks, "victim", sent)
        assert len(decode_ledger(bucket.written[-1]).reported) < 20_001, "it does not fit"
        for _ in range(2):
            await report_each(ledger, [0], None, sent)
            await report_each(ledger, ranks, None, sent)
        assert sent[20_001:] == [(rank, None) for rank in (0, *ranks)]
        assert max(map(len, bucket.written)) < MAX_PAYLOAD
        assert decode_ledger(bucket.written[-1]).restore() == {}

    asyncio.run(check())


def test_a_ledger_that_is_full_has_room_for_reports_that_are_as_large_as_they_may_be():
    async def check():
        bucket, sender = OneDocument(), Sender()
        ledger, _ = await open_ledger(bucket)
        await report_each(ledger, range(10_000), "victim", [])
        for rank in range(10_000, 10_005):
            texts = tuple(sha256(f"{rank} {at}".encode()).hexdigest() for at in range(5_000))
            export = build_verdict("victim", rank, victims=texts)
            written = note(ledger, sender, "victim", export, name(rank))
            assert len(written.content) > MAX_WRITTEN_BYTES / 2
        await ledger.settle()
        assert [at for _, at, _ in sender.records] == list(range(10_000, 10_005))
        assert max(map(len, bucket.written)) < MAX_PAYLOAD

    asyncio.run(check())


def test_the_next_judge_knows_every_alarm_although_victims_do_not_fit():
    async def check():
        bucket, sent = OneDocument(), []
        ledger, _ = await open_ledger(bucket)
        await report_each(ledger, range(3), "culprit", sent)
        await report_each(ledger, range(3, 20_000), "victim", sent)
        heir, said = await open_ledger(bucket)
        assert {rank for rank in range(20_000) if said.get(name(rank)) == "culprit"} == {0, 1, 2}
        newest = range(15_000, 20_000)
        assert all(said.get(name(rank)) == "victim" for rank in newest)
        n_sent = len(sent)
        await report_each(heir, range(3), "culprit", sent)
        await report_each(heir, newest, "victim", sent)
        assert len(sent) == n_sent, "nothing is reported twice"
        await report_each(heir, range(3), None, sent)
        assert sent[n_sent:] == [(rank, None) for rank in range(3)]

    asyncio.run(check())


def test_what_does_not_fit_is_not_reported_twice_and_its_unconfirmed_end_is_left_to_the_next_judge():
    async def check():
        bucket, sent = OneDocument(), []
        ledger, _ = await open_ledger(bucket)
        await report_each(ledger, range(20_000), "victim", sent)
        assert name(0) not in decode_ledger(bucket.written[-1]).reported
        n_sent = len(sent)
        await report_each(ledger, [0], "victim", sent)
        assert len(sent) == n_sent
        ledger.report({name(0): None}, lambda: False)
        await ledger.settle(is_last=True)
        assert (await open_ledger(bucket))[1][name(0)] == "victim"

    asyncio.run(check())
