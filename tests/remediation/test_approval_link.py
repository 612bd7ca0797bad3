"""A proposal's link: what it shows, who may answer by it, once, and what is refused."""

import base64
import json
import re
from dataclasses import replace

import pytest
from tests.remediation.live import run_job, write_policy
from tests.remediation.site import QUICK, Site, build_config
from tests.support import local_http

from ingero.cli.main import run_program
from ingero.cli.programs.remediator import cli
from ingero.config import Endpoint
from ingero.config.document import parse_document
from ingero.errors import ConfigError
from ingero.remediation.approval_html import describe_effect
from ingero.remediation.approval_page import ApprovalPage
from ingero.remediation.building import read_moment
from ingero.remediation.config import build_policy
from ingero.remediation.links import build_signer, parse_token
from ingero.remediation.records import ActionState
from ingero.serving.threaded import HttpRequest, serve_threaded
from ingero.sim.launcher import launch
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S

BASE = "https://remedy.example/ingero"
LINK = "approval: {{expires: 10m, link: {{base_url: {base}, key_file: {key}, labels: [ana, on-call]}}}}\n"


def write_key(folder, mode=0o600):
    file = folder / "key"
    file.write_bytes(base64.b64encode(b"k" * 32))
    file.chmod(mode)
    return file


class Asked:
    """A remediator in mode ask that has proposed to act on n2, and the page behind its links."""

    def __init__(self, folder, base=BASE):
        self.key = write_key(folder)
        config = build_config(LINK.format(base=base, key=self.key), mode="ask")
        file = folder / "journal.db"
        journal = config.journal.model_copy(update={"file": str(file)})
        self.site = Site(file, config.model_copy(update={"journal": journal}))
        self.site.poll(6, ["n2"])
        self.signer = build_signer(config.approval)
        self.page = ApprovalPage(
            self.site.config, self.signer, lambda: read_moment(self.site.clock, "boot")
        )
        self.links = self.signer.build_links(self.record)

    @property
    def record(self):
        (record,) = self.site.journal.actions()
        return record

    def get(self, link):
        return self.page.respond(HttpRequest("GET", link.removeprefix("https://remedy.example")))

    def post(self, link, body=b"answer=approve", **headers):
        path = link.removeprefix("https://remedy.example")
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.page.respond(HttpRequest("POST", path, named, body))

    def notes(self):
        return [one["note"] for one in self.site.journal.changes(self.record.action_id)]


@pytest.fixture
def asked(tmp_path):
    return Asked(tmp_path)


def text_of(response):
    """What a person reads."""
    html = re.sub(r"<style>.*?</style>", "", response.body.decode(), flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


class TestAnswer:
    def test_the_page_says_what_would_be_done_and_why_and_opening_it_changes_nothing(self, asked):
        before = asked.record
        for _ in range(3):
            shown = asked.get(asked.links["ana"])
        assert shown.status == 200
        said = text_of(shown)
        assert "Take n2 out of service?" in said
        assert "Slurm drains n2: it gets no new jobs, and jobs that run there go on." in said
        assert "Why culprit: own time 1.50× that of its 3 peers" in said
        assert "Lost so far 1 h of GPU time" in said
        assert f"Action {before.action_id} for finding {before.episode}" in said
        assert "You answer as ana , once" in said
        assert "the proposal is over at 2026-01-01 00:10:06 UTC" in said
        assert "findings.min_evidence : evidence 10^9.0, wanted 10^4.0" in said
        assert asked.record == before
        assert asked.site.poll(3, ["n2"]).changed == ()

    @pytest.mark.parametrize(
        ("body", "note", "state"),
        [
            (b"answer=approve", "a person agreed by the link of ana", "done"),
            (b"answer=reject", "a person refused by the link of ana", "rejected"),
        ],
    )
    def test_an_answer_is_written_with_whose_link_it_was_and_acted_on(
        self, asked, body, note, state
    ):
        link = asked.links["ana"]
        answer = asked.post(link, body)
        assert (answer.status, answer.headers["Location"]) == (303, link)
        assert note in asked.notes()
        asked.site.poll(3, ["n2"])
        assert asked.site.states() == [state]
        shown = text_of(asked.get(link))
        assert f"n2: {state}" in shown
        assert note in shown
        assert "Approve" not in shown
        assert ("undo" in shown) == (state == "done")

    def test_a_link_takes_one_answer_and_the_first_of_several_people_counts(self, asked):
        assert asked.post(asked.links["ana"], b"answer=reject").status == 303
        for link in asked.links.values():
            assert asked.post(link, b"answer=approve").status == 303
        assert asked.site.states() == ["rejected"]
        assert asked.notes() == ["", "a person refused by the link of ana"]

    def test_an_approval_by_a_link_is_not_taken_back_by_it(self, asked):
        asked.post(asked.links["ana"])
        asked.post(asked.links["ana"], b"answer=reject")
        assert asked.site.states() == ["approved"]

    def test_who_answers_between_reading_and_writing_keeps_the_answer(self, asked):
        read = asked.page._read_now
        first = replace(asked.record, state=ActionState.REJECTED, note="first")

        def answer_first():
            if asked.record.state is ActionState.PROPOSED:
                asked.site.journal.change(asked.record, first)
            return read()

        asked.page._read_now = answer_first
        assert asked.post(asked.links["ana"]).status == 303
        assert asked.notes() == ["", "first"]


class TestRefusals:
    @pytest.mark.parametrize(
        "spoil",
        [
            lambda token: token[:-3] + ("AAA" if token[-3:] != "AAA" else "BBB"),
            lambda token: re.sub(r"\.\d+\.", ".9999999999.", token),
            lambda token: "a0000000000" + token[11:],
            lambda token: token.replace(".YW5h.", ".b24tY2FsbA."),
            lambda token: token.rpartition(".")[0],
            lambda token: token + ".x",
            lambda _: "",
            lambda _: "a.b.c.d",
            lambda token: token.replace(".YW5h.", ".\u00fc."),
        ],
        ids=[
            "signature", "later", "other action", "other label", "cut", "longer", "none", "nonsense", "not ASCII",
        ],
    )  # fmt: skip
    def test_a_link_that_was_changed_is_told_nothing(self, asked, spoil):
        head, _, token = asked.links["ana"].rpartition("/")
        for ask in (asked.get, asked.post):
            answer = ask(f"{head}/{spoil(token)}")
            assert answer.status == 404
            assert "n2" not in text_of(answer)
        assert asked.site.states() == ["proposed"]

    def test_a_link_of_another_key_or_of_a_label_that_was_removed_is_none(self, asked):
        link = asked.links["ana"]
        asked.signer._labels = ("on-call",)
        assert asked.post(link).status == 404
        asked.signer._labels = ("ana", "on-call")
        asked.signer._key = b"x" * 32
        assert asked.post(link).status == 404
        assert asked.site.states() == ["proposed"]

    @pytest.mark.parametrize("name", ["target", "node_id", "cluster_id", "episode", "kind"])
    def test_a_link_is_for_what_was_proposed_alone(self, asked, name):
        token = parse_token(asked.links["ana"].rpartition("/")[2])
        assert asked.signer.is_of(token, asked.record)
        assert not asked.signer.is_of(token, replace(asked.record, **{name: "other"}))

    def test_a_link_that_is_over_takes_no_answer(self, asked):
        asked.site.clock.advance(601 * NS_PER_S)
        assert asked.get(asked.links["ana"]).status == 410
        assert asked.post(asked.links["ana"]).status == 410
        assert asked.site.states() == ["proposed"]

    @pytest.mark.parametrize(
        ("headers", "status"),
        [
            ({}, 303),
            ({"Origin": "https://remedy.example", "Sec_Fetch_Site": "same-origin"}, 303),
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": "http://remedy.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Sec_Fetch_Site": "cross-site"}, 403),
            ({"Sec_Fetch_Site": "same-site"}, 403),
        ],
    )
    def test_a_form_of_another_site_is_refused(self, asked, headers, status):
        assert asked.post(asked.links["ana"], **headers).status == status
        assert asked.site.states() == ["approved" if status == 303 else "proposed"]

    @pytest.mark.parametrize(
        "body", [b"", b"answer=yes", b"answer=approve&answer=reject", b"approve", b"\xff"]
    )
    def test_what_is_no_answer_is_refused(self, asked, body):
        assert asked.post(asked.links["ana"], body).status == 400
        assert asked.site.states() == ["proposed"]

    def test_what_agents_say_is_text_on_the_page(self, asked):
        record = asked.record
        said = {"reason": "<script>alert(1)</script>", "job": "<b>", "victims": ["<i>"]}
        evil = replace(record, evidence={**record.evidence, **said}, note="<u>")
        asked.site.journal.change(record, evil)
        html = asked.get(asked.links["ana"]).body.decode()
        assert "&lt;script&gt;alert(1)" in html
        assert not {"<script>", "<b>", "<i>"} & set(re.findall(r"<\w+>", html))
        asked.post(asked.links["ana"])
        html = asked.get(asked.links["ana"]).body.decode()
        assert "&lt;u&gt;" in html
        assert "<u>" not in html

    def test_nothing_frames_caches_or_follows_the_page(self, asked):
        headers = asked.get(asked.links["ana"]).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "same-origin"


@pytest.mark.parametrize(
    ("base", "origin"),
    [
        ("https://Remedy.Example:443/ingero", "https://remedy.example"),
        ("HTTPS://remedy.example:8443", "https://remedy.example:8443"),
        ("http://127.0.0.1:80", "http://127.0.0.1"),
        ("https://[0:0::1]:9468/x", "https://[::1]:9468"),
        ("https://b\u00fccher.example", "https://xn--bcher-kva.example"),
    ],
)
def test_an_address_may_be_written_otherwise_than_browsers_write_it(tmp_path, base, origin):
    asked = Asked(tmp_path, f"'{base}'")
    path = asked.links["ana"].removeprefix(base)
    answer = asked.post(path, Origin=f"{origin}1")
    assert (answer.status, asked.record.state) == (403, ActionState.PROPOSED)
    answer = asked.post(path, Origin=origin)
    assert (answer.status, asked.record.state) == (303, ActionState.APPROVED)


@pytest.mark.parametrize("base", ["https://remedy.example:99999", "https://[::zz]"])
def test_an_address_that_cannot_be_is_refused_with_the_policy(tmp_path, base):
    with pytest.raises(ConfigError, match="base_url"):
        build_config(LINK.format(base=f"'{base}'", key=write_key(tmp_path)), mode="ask")


class TestPolicy:
    @pytest.mark.parametrize(
        ("text", "description"),
        [
            ("{base_url: 'http://remedy.example', key_file: k}", "should be https"),
            ("{base_url: 'https://r.example/?a=b', key_file: k}", "should have no query"),
            ("{base_url: 'https://r.example', key_file: k, labels: []}", "at least 1 item"),
            ("{base_url: 'https://r.example', key_file: k, labels: [a, a]}", "two labels"),
            ('{base_url: "https://r.example", key_file: k, labels: ["a\\n"]}', "printable"),
            ("{base_url: 'https://r.example'}", "key_file"),
        ],
    )
    def test_a_link_that_could_not_be_trusted_is_refused(self, text, description):
        with pytest.raises(ConfigError, match=description):
            build_policy(parse_document(f"action: {{slurm: {{}}}}\napproval: {{link: {text}}}\n"))

    def test_a_key_that_others_may_read_is_refused_before_anything_starts(self, tmp_path, capsys):
        key = write_key(tmp_path, 0o644)
        file = tmp_path / "policy.yaml"
        file.write_text("action: {slurm: {}}\n" + LINK.format(base=BASE, key=key))
        assert run_program(cli, ["validate", str(file)]) == 2
        said = capsys.readouterr().err
        assert f"approval.link.key_file {key} may be read by others" in said
        assert f"chmod 600 {key}" in said

    @pytest.mark.parametrize(
        ("action", "description"),
        [
            ("slurm: {requeue: true}", "its jobs that allow it are requeued"),
            (
                "kubernetes: {cordon: true}",
                "gets a taint ingero.io/culprit:NoSchedule, a cordon, a condition IngeroCulprit. Pods that run",
            ),
            ("kubernetes: {taint: NoExecute, condition: ''}", "do not tolerate the taint are evicted"),
            ("kubernetes_device: {effect: None}", "Nothing happens to pods"),
            ("kubernetes_device: {effect: NoExecute}", "pods that use it and do not tolerate"),
            ("nvsentinel: {}", "NVSentinel keeps it and does nothing"),
            ("nvsentinel: {strategy: execute}", "does what its rules say"),
            ("command: {drain: [/bin/out], undo: [/bin/in]}", "own command /bin/out takes n2"),
            ("webhook: {url: 'https://w.example/x', secret_file: s}", "webhook at w.example"),
        ],
    )  # fmt: skip
    def test_what_would_be_done_is_said_of_every_action(self, action, description):
        policy = build_policy(parse_document(f"action: {{{action}}}\n"))
        assert description in describe_effect(policy.action, "n2")


def test_the_journal_shows_the_links_of_what_waits_to_those_who_may_read_the_key(asked, capsys):
    file = asked.key.with_name("policy.yaml")
    head = f"mode: ask\naction: {{slurm: {{}}}}\njournal: {{file: {asked.site.path}}}\n{QUICK}}}\n"
    file.write_text(head + LINK.format(base=BASE, key=asked.key))

    def read():
        assert run_program(cli, ["journal", "--config", str(file)]) == 0
        return capsys.readouterr().out

    line = f"  link of on-call: {asked.links['on-call']}\n"
    assert line in read() + "\n"
    asked.key.chmod(0o644)  # which the program refuses, as it would a key that it may not read
    assert "link of" not in read()
    asked.key.chmod(0o600)
    asked.post(asked.links["ana"])
    assert "link of on-call" not in read()


def test_over_http_a_person_sees_the_page_and_answers_once(tmp_path):
    asked = Asked(tmp_path, base="http://127.0.0.1:1")
    with serve_threaded(Endpoint("127.0.0.1", 0), asked.page.respond, "listen") as bound:
        link = asked.links["ana"].replace("127.0.0.1:1", str(bound))
        with local_http.open_client() as client:
            assert client.head(link).status_code == 200
            page = client.get(link)  # a body of the HEAD would be in its way
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert local_http.post(link, content=b"x" * 5000).status_code == 413
        assert local_http.put(link, content=b"answer=approve").status_code == 501
        assert asked.site.states() == ["proposed"]
        headers = {"Origin": "http://127.0.0.1:1"}
        answer = local_http.post(link, data={"answer": "approve"}, headers=headers)
        assert (answer.status_code, answer.headers["location"]) == (303, asked.links["ana"])
        assert asked.site.states() == ["approved"]
        assert local_http.get(link.rpartition("/")[0] + "/").status_code == 404


@pytest.mark.slow
def test_a_real_finding_is_approved_by_the_link_that_was_sent(tmp_path, receiver):
    key, slack = write_key(tmp_path), tmp_path / "slack"
    slack.touch(0o600)
    slack.write_text(receiver.url)
    with run_job() as (agents, pushes):
        file = write_policy(tmp_path, agents, mode="ask")
        lines = [one for one in file.read_text().splitlines() if not one.startswith("action:")]
        action = f"action: {{command: {{drain: [touch, {tmp_path}/out], undo: ['true']}}}}"
        link = f"link: {{base_url: 'http://127.0.0.1', key_file: {key}, listen: '127.0.0.1:0',"
        link += f" send: [{{label: approval link, slack: {{webhook_url_file: {slack}}}}}]}}"
        approval = f"approval: {{{link}}}"
        file.write_text("\n".join([*lines, action, approval, "listen: 127.0.0.1:0"]) + "\n")
        with launch("ingero.cli.programs.remediator", ["run", str(file)]) as program:

            def find_link():
                pushes.push()
                return re.search(r"link of approval link: http://127.0.0.1(/\S+)", program.log)

            path = wait_until(find_link)[1]
            _, body = wait_until(lambda: receiver.got)[0]
            assert json.loads(body)["text"].endswith(f": http://127.0.0.1{path}")
            assert (
                "ingero_remediator_messages_sent_total 1"
                in local_http.get(program.url("metrics", "/metrics")).text
            )
            url = program.url("approval", path)
            assert "Take node5 out of service?" in local_http.get(url).text
            assert not (tmp_path / "out").exists()
            headers = {"Origin": "http://127.0.0.1"}
            assert (
                local_http.post(url, data={"answer": "approve"}, headers=headers).status_code == 303
            )

            def is_done():
                pushes.push()
                return "node5: done" in local_http.get(url).text

            wait_until(is_done)
            assert (tmp_path / "out").exists()
