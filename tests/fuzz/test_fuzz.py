"""Each decoder holds for mutated bodies, and for those that once broke it; what breaks one is noticed. `make fuzz` draws many more."""

import json
import subprocess
import sys

import pytest
from tests.fuzz.__main__ import KEPT, follow
from tests.fuzz.harness import Target, run, take_one
from tests.fuzz.targets import list_targets

pytestmark = pytest.mark.xdist_group("fuzz")
TARGETS = list_targets()
BODIES = sorted(KEPT.glob("*/*"))


@pytest.mark.parametrize("body", BODIES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_what_broke_a_decoder_once_is_answered_now(body):
    take_one(TARGETS[body.parent.name], body.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_holds_for_mutated_bodies(name):
    outcome = run(TARGETS[name], 300, 1, lambda body: None)
    assert outcome.broken is None, outcome.broken
    assert outcome.n_taken + outcome.n_refused == 300


def test_most_decoders_meet_bodies_that_they_take_and_bodies_that_they_refuse():
    both = {}
    for name in ("otlp-logs-protobuf", "otlp-metrics-json", "socket-line", "elf", "recording-file"):
        outcome = run(TARGETS[name], 300, 1, lambda body: None)
        both[name] = min(outcome.n_taken, outcome.n_refused)
    assert min(both.values()) > 5, both


def fails_on_a_high_byte(body):
    if max(body, default=0) > 200:
        raise KeyError(body)


def never_ends_on_a_zero(body):
    while 0 in body:
        pass


class Keeps:
    def __init__(self):
        self.kept = []

    def __call__(self, body):
        self.kept.append(b"x" * (300 << 10))


class Swells:
    """Much memory for its second body, which it gives back at once."""

    def __init__(self):
        self.n_bodies = 0

    def __call__(self, body):
        self.n_bodies += 1
        if self.n_bodies == 2:
            len(b"x" * (300 << 20))


@pytest.mark.parametrize(
    ("take", "description"),
    [
        (fails_on_a_high_byte, "KeyError"),
        (never_ends_on_a_zero, "processor time"),
        (Keeps(), "grew by"),
        (Swells(), "grew by"),
    ],
)
def test_a_planted_fault_is_found(take, description):
    outcome = run(
        Target("planted", (b"abcdefgh" * 4,), take, (ValueError,)), 1500, 1, lambda body: None
    )
    assert description in outcome.broken[1]


def test_memory_that_was_held_before_does_not_hide_what_a_body_takes():
    len(b"x" * (500 << 20))
    broken = run(Target("planted", (b"abcd",), Swells(), ()), 5, 1, lambda body: None).broken
    assert broken
    assert "grew by" in broken[1]


def test_an_outcome_longer_than_a_pipe_holds_arrives(tmp_path):
    shared = tmp_path / "shared"
    shared.write_bytes(bytes(16))
    script = "import json; print(json.dumps({'broken': ['ab' * (1 << 20), 'why']}))"
    status, said = follow([sys.executable, "-c", script], shared)
    assert (status, json.loads(said)) == (0, {"broken": ["ab" * (1 << 20), "why"]})


def test_a_process_that_no_signal_of_its_own_stops_is_killed(tmp_path):
    shared = tmp_path / "shared"
    shared.write_bytes(bytes(16))
    status, _ = follow([sys.executable, "-c", "import signal; signal.pause()"], shared, 0.2)
    assert status == -9


def test_an_error_that_a_decoder_documents_is_no_fault():
    def refuse(body):
        if body != b"good":
            raise ValueError(f"not good: {len(body)}")

    outcome = run(Target("planted", (b"good",), refuse, (ValueError,)), 200, 1, lambda body: None)
    assert outcome.broken is None
    assert outcome.n_kinds == 1  # numbers in a message make no other kind


def test_the_same_seed_makes_the_same_bodies():
    seen = [], []
    for bodies in seen:
        run(Target("planted", (b"abc", b"defgh"), lambda body: None, ()), 50, 7, bodies.append)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 25


def test_the_command_says_what_it_did():
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "annotation", "--bodies", "50", "--seed", "3"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "annotation" in done.stdout
    assert "seed 3; 0 of 1 decoders broke" in done.stdout
