"""The example clients against a real socket; the frameworks' own classes are stand-ins."""

import importlib.util
import os
import sys
import types
from pathlib import Path

import pytest

from ingero.agent.annotations.listener import open_annotations
from ingero.telemetry.clock import SystemClock
from ingero.testing.waiting import wait_until

EXAMPLES = Path(__file__).parents[3] / "examples" / "annotate"


def load(name, monkeypatch, **modules):
    for module, content in modules.items():
        dotted = module.replace("__", ".")
        parts = dotted.split(".")
        for upto in range(1, len(parts)):
            monkeypatch.setitem(
                sys.modules, ".".join(parts[:upto]), types.ModuleType(".".join(parts[:upto]))
            )
        made = types.ModuleType(dotted)
        made.__dict__.update(content)
        monkeypatch.setitem(sys.modules, dotted, made)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def client(monkeypatch):
    return load("ingero_annotate", monkeypatch)


@pytest.fixture
def agent(tmp_path):
    taken = []
    path = tmp_path / "a.sock"
    with open_annotations(path, -1, taken.extend, SystemClock()) as serving:
        yield types.SimpleNamespace(path=path, taken=taken, serving=serving)


def said(agent, n):
    wait_until(lambda: len(agent.taken) + agent.serving.counts.n_rejected >= n)
    assert agent.serving.counts.n_rejected == 0
    return [one.labels for one in agent.taken]


def test_what_a_loop_says_is_of_its_own_process(client, agent):
    annotator = client.Annotator(agent.path, run_id="r7")
    annotator.say(step=1, phase="forward")
    with annotator.span(phase="check\npoint"):
        pass
    assert said(agent, 2) == [
        {"run_id": "r7", "step": "1", "phase": "forward"},
        {"run_id": "r7", "phase": "check point"},
    ]
    assert {one.pid for one in agent.taken} == {os.getpid()}
    assert 0 < agent.taken[1].span_start_ns <= agent.taken[1].span_end_ns
    annotator.close()


def test_a_long_value_is_cut_and_still_taken(client, agent):
    annotator = client.Annotator(agent.path)
    annotator.say(note="ü" * 300)
    assert said(agent, 1) == [{"note": "ü" * 128}]
    annotator.close()


def test_a_forked_worker_speaks_for_itself(client, agent):
    annotator = client.Annotator(agent.path)
    annotator.say(step=1)
    said(agent, 1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        annotator.say(step=2)
        os.read(reading, 1)
        os._exit(0)
    said(agent, 2)
    os.write(writing, b"x")
    os.waitpid(child, 0)
    annotator.say(step=3)
    said(agent, 3)
    assert [one.pid for one in agent.taken] == [os.getpid(), child, os.getpid()]
    os.close(reading)
    os.close(writing)
    annotator.close()


def test_without_an_agent_nothing_is_raised_and_one_that_comes_is_found(
    client, tmp_path, monkeypatch
):
    path = tmp_path / "a.sock"
    annotator = client.Annotator(path)
    annotator.say(step=1)
    assert annotator.n_dropped == 1
    taken = []
    with open_annotations(path, -1, taken.extend, SystemClock()):
        annotator.say(step=2)  # too soon to look again
        assert annotator.n_dropped == 2
        monkeypatch.setattr(client, "RETRY_S", 0.0)
        annotator._retry_at = 0.0
        annotator.say(step=3)
        wait_until(lambda: taken)
    annotator.say(step=4)
    assert [one.labels["step"] for one in taken] == ["3"]
    assert annotator.n_dropped == 3
    annotator.close()


def test_an_agent_that_does_not_read_holds_nobody_up(client, tmp_path):
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stuck:
        stuck.bind(str(tmp_path / "a.sock"))
        stuck.listen(1)
        annotator = client.Annotator(tmp_path / "a.sock")
        for step in range(20_000):  # more than any socket buffer
            annotator.say(step=step)
        assert annotator.n_dropped > 0
        annotator.close()


class Trainer:
    global_step, current_epoch = 41, 2


def test_the_lightning_hooks_say_step_epoch_and_phase(client, agent, monkeypatch):
    module = load(
        "lightning_callback", monkeypatch, lightning__pytorch__callbacks={"Callback": object}
    )
    callback = module.IngeroCallback(client.Annotator(agent.path))
    callback.on_train_batch_start(Trainer(), None, None, 0)
    callback.on_save_checkpoint(Trainer(), None, {})
    callback.on_train_end(Trainer(), None)
    assert said(agent, 3) == [
        {"step": "41", "epoch": "2", "phase": "train"},
        {"step": "41", "phase": "checkpoint"},
        {"phase": "end"},
    ]


def test_the_hugging_face_hooks_say_step_epoch_and_phase(client, agent, monkeypatch):
    module = load("huggingface_callback", monkeypatch, transformers={"TrainerCallback": object})
    callback = module.IngeroCallback(client.Annotator(agent.path))
    state = types.SimpleNamespace(global_step=7, epoch=1.25)
    callback.on_step_begin(None, state, None, model=None)
    callback.on_evaluate(None, state, None, metrics={})
    callback.on_train_end(None, state, None)
    assert said(agent, 3) == [
        {"step": "7", "epoch": "1", "phase": "train"},
        {"step": "7", "phase": "evaluated"},
        {"phase": "end"},
    ]


def test_a_ray_worker_says_its_run_and_rank(client, agent, monkeypatch):
    context = types.SimpleNamespace(get_experiment_name=lambda: "exp", get_world_rank=lambda: 3)
    train = types.SimpleNamespace(get_context=lambda: context)
    module = load("ray_train_loop", monkeypatch, ray={"train": train})
    monkeypatch.setattr(client, "SYSTEM_SOCKET", agent.path)
    annotator = module.build_annotator()
    annotator.say(step=1)
    assert said(agent, 1) == [{"run_id": "exp", "task_id": "3", "step": "1"}]
    annotator.close()


def test_the_readme_names_every_example():
    text = (EXAMPLES / "README.md").read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f"`{path.name}`" not in text] == []
