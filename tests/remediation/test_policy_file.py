"""The policy file: what is refused, with line and nearest name, and what the defaults are."""

from typing import get_args

import pytest

from ingero.config.document import parse_document
from ingero.errors import ConfigError
from ingero.model.diagnosis import CauseKind
from ingero.remediation.config import NodeCause, build_policy, write_defaults


def problems(text):
    with pytest.raises(ConfigError) as caught:
        build_policy(parse_document(text))
    return [str(one) for one in caught.value.problems]


def test_the_printed_defaults_are_valid_and_only_say_what_would_be_done():
    config = build_policy(parse_document(write_defaults()))
    assert config.mode == "dry-run"
    assert config == build_policy(parse_document("action: {slurm: {}}"))


def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_name():
    text = "action: {slurm: {}}\nbrakes:\n  max_node_per_hour: 3\n"
    assert problems(text) == [
        "line 3: brakes.max_node_per_hour: unknown key (did you mean max_nodes_per_hour?)"
    ]


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("mode: auto", "line 1: action: is required"),
        ("action: {}", "give exactly one of"),
        ("action: {slurm: {}}\nmode: autom", "'dry-run', 'ask' or 'auto'"),
        ("action: {slurm: {}}\nfleet: {admin_url: '127.0.0.1:8081'}", "http://HOST:PORT"),
        ("action: {slurm: {}}\nbrakes: {hours: [{begin: '25:00'}]}", "not a time of day"),
        ("action: {slurm: {}}\nbrakes: {maintenance: [{days: [sonntag]}]}", "'mon', 'tue'"),
        ("action: {slurm: {}}\nbrakes: {protected_nodes: ['gpu[01-16]']}", "only * and ? match"),
        ("action: {slurm: {}}\nbrakes: {protected_nodes: ['login1,login2']}", "only * and ? match"),
        ("action: {slurm: {}}\nfindings: {max_age: 3s}", "at least twice fleet.poll_interval"),
        ("action: {slurm: {}}\nfindings: {min_evidence: -1}", "greater than or equal to 0"),
    ],
)
def test_a_wrong_value_is_refused(text, description):
    assert any(description in one for one in problems(text)), problems(text)


def test_a_policy_may_want_every_cause_that_is_a_slow_ranks():
    others = {
        CauseKind.ASLEEP, CauseKind.NETWORK_DELAY, CauseKind.NETWORK_LOSS, CauseKind.WINDOW_LIMITED,
        CauseKind.SLOW_PORT, CauseKind.UNEXPLAINED,
    }  # fmt: skip
    assert set(get_args(NodeCause)) == set(CauseKind) - others
