import pytest

from ingero.agent.health.signal_script import ScriptConfig, ScriptSource, load_script
from ingero.agent.health.signals.reading import Signals
from ingero.config import parse_model
from ingero.errors import ConfigError

SECOND_NS = 1_000_000_000
TIMELINE = """
then: {then}
defaults: {{throughput: 50, workload: a}}
steps:
  - {{for: 2s}}
  - {{for: 1s, throughput: 30, memory: null}}
  - {{for: 1s, read: fail}}
  - {{for: 1s, stall: true}}
  - {{for: 1s, throughput: 0, workload: b}}
"""


@pytest.fixture
def load(tmp_path):
    def load_text(text, name="day.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return ScriptSource(load_script(path))

    return load_text


def play(source, seconds, start_s=1000):
    return [source.read(7, (start_s + second) * SECOND_NS) for second in range(seconds)]


def test_each_step_lasts_its_time_and_leaves_nothing_behind(load):
    source = load(TIMELINE.format(then="hold"))
    first, second, slow, failed, hung, idle, held = play(source, 7)
    assert first == second
    assert first.signals == Signals(50.0, 0.9, 0.9, 0.9)
    assert (first.launches, first.workload, first.wall_ns) == (10, "a", 7)
    assert slow.signals == Signals(30.0, 0.9, None, 0.9)
    assert failed is None
    assert hung.is_hung
    assert hung.signals.throughput == 0
    assert (idle.launches, idle.is_hung, idle.workload) == (0, False, "b")
    assert held == idle
    assert not source.is_over


def test_a_timeline_can_repeat_or_stop(load):
    repeated = play(load(TIMELINE.format(then="repeat")), 9)
    assert repeated[6:] == repeated[:3]
    source = load(TIMELINE.format(then="stop"))
    play(source, 6)
    assert not source.is_over
    play(source, 7)
    assert source.is_over


def test_noise_is_the_seeds(load):
    text = "seed: 7\nsteps: [{for: 1s, noise: 0.05}]\n"
    first, again = play(load(text), 5), play(load(text), 5)
    other = play(load(text.replace("7", "8")), 5)
    assert first == again
    assert first != other
    assert len({reading.signals.compute for reading in first}) == 5


def test_lines_of_json_are_steps(load):
    source = load('{"for": "1s"}\n\n{"for": "1s", "throughput": 3}\n', "day.jsonl")
    assert [reading.signals.throughput for reading in play(source, 2)] == [100.0, 3.0]


def test_mistakes_in_lines_of_json_are_told_with_their_lines(load):
    with pytest.raises(ConfigError) as caught:
        load('{"for": "1s"}\n{"for": "1s", "cpuu": 1}\n{\n', "day.jsonl")
    text = str(caught.value)
    assert "line 2" in text
    assert "line 3" in text
    assert "cpu" in text


def test_a_script_without_steps_is_none():
    with pytest.raises(ConfigError, match="steps"):
        parse_model(ScriptConfig, {})
