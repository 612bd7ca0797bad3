"""A command and a signed webhook: what they are given, and what becomes of an action whose outcome nobody knows."""

import base64
import hashlib
import hmac
import json
import sys
from dataclasses import replace

import pytest
from tests.remediation.site import QUICK, Site, build_config
from tests.remediation.test_slurm import RECORD

from ingero.config.document import parse_document
from ingero.errors import ConfigError, PermanentError, RetryableError
from ingero.remediation.actuators.command import CommandActuator
from ingero.remediation.actuators.webhook import WebhookActuator
from ingero.remediation.building import build_actuator
from ingero.remediation.config import CommandConfig, SignedWebhookConfig, WindowConfig, build_policy
from ingero.remediation.records import ActionState
from ingero.remediation.secret_file import read_secret
from ingero.testing.clock import ManualClock
from ingero.testing.remediation import build_verdict

KEY = b"0123456789abcdef0123456789abcdef"
SCRIPT = """\
import json, os, sys
action = json.load(sys.stdin)
with open({log!r}, "a") as log:
    print(action["event"], os.environ["INGERO_ACTION_NODE_ID"], action["evidence"]["verdict"], file=log)
sys.exit(int(open({status!r}).read()))
"""


class Commands:
    """A site's script that ends as a test says."""

    def __init__(self, folder):
        self.log, self.status = folder / "log", folder / "status"
        script = folder / "script.py"
        script.write_text(SCRIPT.format(log=str(self.log), status=str(self.status)))
        self.words = [sys.executable, "-S", str(script)]
        self.end_with(0)

    def end_with(self, status):
        self.status.write_text(str(status))

    @property
    def lines(self):
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def commands(tmp_path):
    return Commands(tmp_path)


@pytest.fixture
def commanded(tmp_path, commands):
    """A site whose nodes a command takes out."""
    action = json.dumps({"drain": commands.words, "undo": commands.words})
    text = f"mode: auto\naction: {{command: {action}}}\n{QUICK}}}\n"
    site = Site(tmp_path / "j.db", build_policy(parse_document(text)))
    site.slurm = build_actuator(site.config, site.clock)
    site.start()
    return site


def test_a_command_is_given_the_node_and_its_finding_and_undoes_when_asked(commanded, commands):
    commanded.poll(10, ["n2"])
    assert (commands.lines, commanded.states()) == (["drain n2 culprit"], ["done"])
    (action,) = commanded.journal.actions()
    commanded.journal.change(action, replace(action, state=ActionState.UNDOING, is_asked_back=True))
    commanded.poll(3)
    assert (commands.lines[1:], commanded.states()) == (["undo n2 culprit"], ["undone"])


def test_a_command_that_refuses_did_nothing_and_one_that_cannot_tell_is_asked_again(
    commanded, commands
):
    commands.end_with(75)
    commanded.poll(4, ["n2"])
    assert commanded.states() == ["begun"]
    commands.end_with(0)
    commanded.poll(4, ["n2"])
    assert commanded.states() == ["done"]
    assert set(commands.lines) == {"drain n2 culprit"}


@pytest.mark.parametrize("brake", ["over", "protected", "maintenance", "panic", "stop", "restart"])
def test_what_is_left_open_is_undone_and_not_asked_again_once_the_policy_would_not_begin_it(
    commanded, commands, tmp_path, brake
):
    commands.end_with(75)
    commanded.poll(3, ["n2"])
    assert commanded.states() == ["begun"]
    commands.end_with(0)
    changed = {
        "protected": {"protected_nodes": ("n2",)},
        "maintenance": {"maintenance": (WindowConfig(),)},
        "stop": {"stop_file": str(tmp_path / "stop")},
    }.get(brake, {})
    brakes = commanded.config.brakes.model_copy(update=changed)
    commanded.config = commanded.config.model_copy(update={"brakes": brakes})
    commanded.remediator._config = commanded.config
    if brake == "restart":
        commanded.start()
    if brake == "stop":
        (tmp_path / "stop").touch()
        commanded.poll(5, [])
        assert (commands.lines, commanded.states()) == (["drain n2 culprit"], ["begun"])
        (tmp_path / "stop").unlink()
    if brake == "panic":
        for n_ops in range(50, 53):
            commanded.fleet.say(build_verdict("n2", n_ops=n_ops), in_panic=True)
            commanded.poll(1)
    else:
        commanded.poll(3, [] if brake in {"over", "stop"} else ["n2"])
    assert commands.lines == ["drain n2 culprit", "undo n2 culprit"]
    assert commanded.states() == ["undone"]
    commanded.poll(10, ["n2"])
    assert commanded.states() == ["undone"]  # what is unknown counts as done


def test_a_command_that_refuses_to_undo_what_it_left_open_ends_the_action(commanded, commands):
    commands.end_with(75)
    commanded.poll(3, ["n2"])
    commands.end_with(1)
    commanded.poll(3, [])
    assert commanded.states() == ["left"]


def test_a_node_that_a_command_refuses_to_give_back_counts_as_out_and_is_asked_for_again(
    commanded, commands
):
    commanded.poll(10, ["n2"])
    (action,) = commanded.journal.actions()
    commands.end_with(1)
    commanded.journal.change(action, replace(action, state=ActionState.UNDOING, is_asked_back=True))
    commanded.poll(5, ["n3"])
    (action,) = commanded.journal.actions()  # the one place is taken
    assert action.state is ActionState.UNDOING
    assert action.note.startswith("refused to give it back: ")
    assert commands.lines[1:] == ["undo n2 culprit"] * 3  # every settle time
    commands.end_with(0)
    commanded.poll(3, [])
    assert commanded.states() == ["undone"]


def test_what_a_command_did_counts_and_is_left_alone_under_a_policy_of_slurm(commanded):
    commanded.poll(10, ["n2"])
    site = Site(commanded.path, build_config(), clock=commanded.clock, n_ops=commanded.n_ops)
    site.poll(10, ["n3"])
    assert (site.drained, site.states()) == (set(), ["done"])


def test_a_drain_of_slurm_is_not_undone_by_a_command(commanded, commands):
    site = Site(commanded.path, build_config(), clock=commanded.clock)
    site.poll(10, ["n2"])
    (action,) = site.journal.actions()
    site.journal.change(action, replace(action, state=ActionState.UNDOING, is_asked_back=True))
    commanded.poll(3, [])
    assert (commands.lines, site.drained, site.states()) == ([], {"n2"}, ["undoing"])


def test_a_command_that_refuses_is_given_up_after_three_tries(commanded, commands):
    commands.end_with(1)
    commanded.poll(40, ["n2"])
    assert commanded.states() == ["void", "void"]  # a third would be one too many within the hour
    assert len(commands.lines) == 2


def test_a_command_that_is_not_there_or_hangs_is_said():
    config = CommandConfig(drain=("/nowhere/x",), undo=("/nowhere/x",))
    with pytest.raises(PermanentError, match="cannot be started: No such file"):
        CommandActuator(config).apply(RECORD)
    config = CommandConfig(drain=("sleep", "60"), undo=("true",), timeout="50ms")
    with pytest.raises(RetryableError, match="did not end in time"):
        CommandActuator(config).apply(RECORD)


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text("whsec_" + base64.b64encode(KEY).decode() + "\n")
    return str(file)


def test_a_webhook_is_signed_over_its_id_time_and_body(receiver, secret):
    clock = ManualClock()
    hook = WebhookActuator(SignedWebhookConfig(url=receiver.url, secret_file=secret), clock.wall_ns)
    hook.apply(RECORD)
    hook.reverse(RECORD)
    (headers, body), (undo_headers, _) = receiver.got
    assert headers["webhook-id"] == "a0123456789-drain"
    assert undo_headers["webhook-id"] == "a0123456789-undo"
    signed = f"a0123456789-drain.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert headers["webhook-timestamp"] == "1767225600"
    assert json.loads(body)["node_id"] == "node5.site"


@pytest.mark.parametrize(
    ("status", "error"),
    [(500, RetryableError), (429, RetryableError), (302, PermanentError), (403, PermanentError)],
)
def test_an_answer_that_may_pass_is_tried_again_and_others_are_refusals(
    receiver, secret, status, error
):
    receiver.status = status
    hook = WebhookActuator(SignedWebhookConfig(url=receiver.url, secret_file=secret), lambda: 0)
    with pytest.raises(error, match=str(status)):
        hook.apply(RECORD)
    assert len(receiver.got) == 1  # a redirect is not followed


@pytest.mark.parametrize(
    ("text", "mode", "description"),
    [
        ("", 0o600, "is empty"),
        ("QUJD", 0o600, "shorter than 24"),
        ("?", 0o600, "not base64"),
        ("A" * 64, 0o640, "read by others"),
    ],
)
def test_a_secret_that_protects_nothing_is_refused(tmp_path, text, mode, description):
    file = tmp_path / "s"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigError, match=description):
        read_secret(str(file), "action.webhook.secret_file")


def test_a_webhook_over_plain_http_is_for_loopback_only():
    text = "action: {webhook: {url: 'http://drains.example/x', secret_file: /s}}"
    with pytest.raises(ConfigError, match=r"webhook\.url: should be https"):
        build_policy(parse_document(text))
