"""A proposal's link is sent to people: to whom the policy says, once, and for as long as the proposal waits."""

import base64
import hashlib
import hmac
import json
import re
from dataclasses import replace

import pytest
from tests.remediation.test_approval_link import BASE, Asked, write_key

from ingero.cli.main import run_program
from ingero.cli.programs.remediator import cli
from ingero.config.document import parse_document
from ingero.errors import ConfigError
from ingero.remediation.config import build_policy
from ingero.remediation.messages import ProposalSender
from ingero.remediation.records import ActionState
from ingero.units import NS_PER_S

LINK = """\
action: {{slurm: {{}}}}
approval:
  expires: 10m
  link: {{base_url: {base}, key_file: {key}, labels: [ana, on-call], send: {send}}}
"""


@pytest.fixture
def asked(tmp_path):
    return Asked(tmp_path)


@pytest.fixture
def files(tmp_path, receiver):
    """The secrets of both kinds of receivers."""
    slack = tmp_path / "slack"
    slack.touch(0o600)
    slack.write_text(receiver.url + "\n")
    return {"slack": slack, "webhook": tmp_path / "key"}


def make_sender(asked, send):
    """A program that has just started."""
    policy = LINK.format(base=BASE, key=asked.key, send=json.dumps(send))
    approval = build_policy(parse_document(policy)).approval
    config = asked.site.config.model_copy(update={"approval": approval})
    return ProposalSender(config, asked.signer, asked.site.clock)


def to_slack(files, label="on-call"):
    return [{"label": label, "slack": {"webhook_url_file": str(files["slack"])}}]


def send(sender, asked):
    sender.send_waiting(asked.site.journal.actions())


def counts(sender):
    return sender.counts.n_sent, sender.counts.n_failures, sender.counts.n_refused


def test_people_are_told_once_what_is_asked_of_them_and_the_link_answers(asked, files, receiver):
    sender = make_sender(asked, to_slack(files))
    for _ in range(3):
        send(sender, asked)
    ((headers, body),) = receiver.got
    lines = json.loads(body)["text"].splitlines()
    assert lines == [
        "Take n2 of c out of service?",
        "culprit: own time 1.50× that of its 3 peers",
        "Slurm drains n2: it gets no new jobs, and jobs that run there go on.",
        f"Approve or reject until 2026-01-01 00:10 UTC: {asked.links['on-call']}",
    ]
    assert headers["content-type"] == "application/json"
    assert counts(sender) == (1, 0, 0)
    link = re.search(r"https\S+", lines[-1])[0]
    assert asked.post(link).status == 303
    assert "a person agreed by the link of on-call" in asked.notes()
    send(make_sender(asked, to_slack(files)), asked)
    assert len(receiver.got) == 1, "nothing waits any more"


def test_what_agents_say_is_no_markup(asked, files, receiver):
    said = {"reason": "<!channel> & <https://evil.example|here>"}
    asked.site.journal.change(asked.record, replace(asked.record, evidence=said))
    send(make_sender(asked, to_slack(files)), asked)
    text = json.loads(receiver.got[0][1])["text"]
    assert "&lt;!channel&gt; &amp; &lt;https://evil.example|here&gt;" in text
    assert "<" not in text


def test_a_program_gets_it_signed_and_under_the_same_id_each_time(asked, files, receiver):
    webhook = {"url": receiver.url, "secret_file": str(files["webhook"])}
    destination = [{"label": "ana", "webhook": webhook}]
    receiver.status = 503
    sender = make_sender(asked, destination)
    send(sender, asked)
    receiver.status = 204
    send(make_sender(asked, destination), asked)  # after a restart
    (first, _), (headers, body) = receiver.got
    assert first["webhook-id"] == headers["webhook-id"]
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(b"k" * 32, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    told = json.loads(body)
    assert (told["event"], told["id"]) == ("proposal", asked.record.action_id)
    assert (told["label"], told["link"]) == ("ana", asked.links["ana"])
    assert told["until_unix_s"] * NS_PER_S > asked.record.changed.wall_ns
    assert "Slurm drains n2" in told["effect"]


def test_a_receiver_that_is_away_is_tried_ever_less_often_until_it_takes_it(asked, files, receiver):
    receiver.status = 500
    sender, tried = make_sender(asked, to_slack(files)), []
    for at_s in range(200):
        before = len(receiver.got)
        send(sender, asked)
        if len(receiver.got) > before:
            tried.append(at_s)
        asked.site.clock.advance(NS_PER_S)
    assert tried == [0, 1, 3, 7, 15, 31, 63, 123, 183]
    receiver.status = 200
    asked.site.clock.advance(60 * NS_PER_S)
    for _ in range(3):
        send(sender, asked)
        asked.site.clock.advance(60 * NS_PER_S)
    assert counts(sender) == (1, len(tried), 0)


def test_a_refusal_is_counted_and_not_asked_for_again(asked, files, receiver, caplog):
    receiver.status = 404
    sender = make_sender(asked, to_slack(files))
    for _ in range(3):
        send(sender, asked)
        asked.site.clock.advance(60 * NS_PER_S)
    assert len(receiver.got) == 1
    assert counts(sender) == (0, 0, 1)
    assert "was refused: the webhook answered 404" in caplog.text
    assert receiver.url not in caplog.text, "the address is a secret"


def test_one_receiver_that_is_away_keeps_nothing_from_another(asked, files, receiver):
    gone = files["slack"].with_name("gone")
    gone.touch(0o600)
    gone.write_text("http://127.0.0.1:1/nobody")
    sender = make_sender(asked, [*to_slack({"slack": gone}, "ana"), *to_slack(files)])
    send(sender, asked)
    assert len(receiver.got) == 1
    assert counts(sender) == (1, 1, 0)
    files["slack"].write_text(receiver.url + "/new")  # an address that was changed is read again
    again = replace(asked.record, action_id="a1111111111")
    sender.send_waiting([again])
    assert len(receiver.got) == 2


def test_what_is_answered_or_over_is_not_sent(asked, files, receiver):
    sender = make_sender(asked, to_slack(files))
    for state in set(ActionState) - {ActionState.PROPOSED}:
        sender.send_waiting([replace(asked.record, state=state)])
    assert receiver.got == []


@pytest.mark.parametrize(
    ("destination", "description"),
    [
        ("[{label: bob, slack: {webhook_url_file: f}}]", "'bob' is none of labels"),
        ("[{label: ana}]", "needs slack or webhook"),
        ("[{label: ana, slack: {webhook_url_file: f}, webhook: {url: 'https://h/x', secret_file: s}}]", "only one"),
        ("[{label: ana, webhook: {url: 'http://hooks.example/x', secret_file: s}}]", "should be https"),
    ],
)  # fmt: skip
def test_a_receiver_that_is_none_is_refused(destination, description):
    with pytest.raises(ConfigError, match=description):
        build_policy(parse_document(LINK.format(base=BASE, key="k", send=destination)))


@pytest.mark.parametrize(
    ("text", "mode", "description"),
    [("https://h/x", 0o644, "read by others"), ("", 0o600, "is empty")],
)
def test_an_address_that_is_no_secret_is_refused_before_anything_starts(
    tmp_path, capsys, text, mode, description
):
    slack, policy = tmp_path / "slack", tmp_path / "policy.yaml"
    slack.write_text(text)
    slack.chmod(mode)
    key = write_key(tmp_path)
    policy.write_text(LINK.format(base=BASE, key=key, send=json.dumps(to_slack({"slack": slack}))))
    assert run_program(cli, ["validate", str(policy)]) == 2
    said = capsys.readouterr().err
    assert f"approval.link.send.slack.webhook_url_file {slack}" in said
    assert description in said
