"""Every key of ``ingero.yaml`` acts in `trace` and in `fleet-push`, or the command says that it does not."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from ingero.agent.health.signals.node_facts import GpuFacts
from ingero.cli.commands.fleet_push import FleetPushConfig
from ingero.cli.commands.trace.config import TraceConfig
from ingero.cli.main import cli
from ingero.cli.options import take_config
from ingero.cli.push_settings import build_settings
from ingero.cli.settings_file import find_settings, load_settings
from ingero.config.environment import read_kubelet_socket, read_probe_mode

PUSHED = {
    "fleet.endpoint": "https://other:4318",
    "fleet.cluster_id": "other",
    "fleet.node_id": "n9",
    "agent.node": "n9",
    "fleet.workload_type": "training",
    "fleet.push_interval": "7s",
    "fleet.timeout": "900ms",
    "fleet.insecure": "true",
    "fleet.tls_ca": "CA",
    "fleet.tls_cert": "CA",
    "fleet.tls_key": "CA",
    "fleet.protocol": "grpc",
    "fleet.compression": "gzip",
    "fleet.header": "[X-Team=a]",
    "fleet.bearer_token_file": "/run/token",
    "fleet.persist_path": "/srv/baseline.json",
    "fleet.persist_stale_age": "9m",
    "fleet.spill_dir": "/srv/spill",
    "fleet.spill_size": "1MiB",
    "fleet.spill_age": "1h",
    "fleet.world_size": "4",
    "fleet.node_rank": "1",
    "fleet.provider": "aws",
    "fleet.threshold_url": "https://fleet:8080",
    "fleet.poll_interval": "11s",
    "fleet.classifier_hysteresis": "0.03",
    "fleet.classifier_confirm": "3",
    "fleet.peers_wait": "4s",
    "fleet.early_push_delta": "0.5",
    "fleet.sample_interval": "2s",
    "fleet.warmup_samples": "31",
    "remediate.enabled": "true",
    "remediate.socket": "/run/other.sock",
    "remediate.gid": "7",
    "otlp.enabled": "true",
    "otlp.endpoint": "collector:4318",
    "otlp.insecure": "false",
}
"""What changes how the agent pushes: a value other than the default."""
TAKEN = {
    "annotate.enabled": "true",
    "annotate.socket": "/run/other.sock",
    "annotate.gid": "7",
    "fleet_push.signal_db_path": "run.db",
    "fleet_push.signal_window": "20s",
    "fleet_push.signal_num_gpus": "2",
    "fleet_push.stub": "true",
    "fleet_push.script": "day.yaml",
    "fleet_push.prometheus": "true",
    "fleet_push.json": "true",
    "trace.pid": "[1]",
    "trace.user": "root",
    "trace.cgroup": "/x",
    "trace.duration": "1s",
    "trace.json": "true",
    "trace.db": "x.db",
    "trace.record": "false",
    "trace.incidents": "false",
    "trace.record_all": "true",
    "trace.max_db": "1g",
    "trace.db_rollover_size": "1g",
    "trace.db_rollover_keep": "2",
    "trace.sampling_rate": "2",
    "trace.ringbuf_size": "1m",
    "trace.stack": "true",
    "trace.no_io": "true",
    "trace.no_tcp": "true",
    "trace.no_net": "true",
    "trace.cuda_lib": "[CA]",
    "trace.prometheus": "true",
    "trace.hw_metrics": "true",
    "trace.otlp": "https://c:4318",
    "trace.otlp_insecure": "true",
    "trace.otlp_header": "[a=b]",
    "inference.enabled": "true",
    "inference.warmup": "40",
    "inference.outlier_ratio": "4",
    "inference.kvcache_top_n": "6",
    "inference.kvcache_max_per_pid": "9",
    "inference.scrape_engines": '"off"',
    "inference.scrape_interval": "20s",
    "inference.scrape_host": "::1",
    "inference.scrape_redetect_interval": "40s",
}
"""What the command itself takes."""
HELD = {
    "agent.probe_mode": ("pair", lambda: read_probe_mode().value),
    "agent.kubelet_socket": ("/run/k.sock", lambda: str(read_kubelet_socket())),
}
"""What holds in the whole process, and where it is read."""
BESIDE = {
    "fleet.node_rank": {"fleet.world_size": "4"},
    "remediate.socket": {"remediate.enabled": "true"},
    "remediate.gid": {"remediate.enabled": "true"},
    "fleet.insecure": {"fleet.endpoint": "fleet:4318"},
    "fleet.tls_cert": {"fleet.tls_cert": "CERT", "fleet.tls_key": "KEY"},
    "fleet.tls_key": {"fleet.tls_cert": "CERT", "fleet.tls_key": "KEY"},
    "fleet.poll_interval": {"fleet.threshold_url": "https://fleet:8080"},
    "otlp.enabled": {"otlp.endpoint": "collector:4318"},
    "otlp.endpoint": {"otlp.enabled": "true", "otlp.endpoint": "first:4318"},
    "otlp.insecure": {"otlp.enabled": "true", "otlp.endpoint": "collector:4318"},
}
"""Without which a key says nothing."""
OTHERS_ONLY = {
    "trace": {"otlp.enabled", "otlp.endpoint", "otlp.insecure"},
    "fleet-push": {key for key in TAKEN if key.startswith("inference.")},
}
"""Keys of shared sections that a command has no option for; it says so."""
BASE = {"fleet.endpoint": "https://fleet:4318", "fleet.cluster_id": "c", "agent.node": "n1"}


def write(folder, values):
    sections = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections.setdefault(section, []).append(f"  {name}: {value}\n")
    file = folder / "ingero.yaml"
    file.write_text("".join(f"{name}:\n{''.join(lines)}" for name, lines in sections.items()))
    return file


def take(name, file):
    """The configuration of a command, and the agent's settings that it makes."""
    with CliRunner().isolation(env={}):
        root = cli.make_context("ingero", [name], resilient_parsing=True)
        context = cli.commands[name].make_context(name, ["--config", str(file)], parent=root)
        with context:
            params = dict(context.params)
            if name == "trace":
                config = take_config(TraceConfig, params)
                return config, config.build_push()
            config = take_config(FleetPushConfig, params)
            spans = config.spans
            return config, build_settings(config.push, config.remediate, GpuFacts(), spans)


@pytest.fixture
def values(tmp_path):
    files = {}
    for name in ("CA", "CERT", "KEY"):
        files[name] = tmp_path / name
        files[name].touch(mode=0o600)
    return lambda text: text if (found := files.get(text.strip("[]"))) is None else str(found)


def uses():
    return [
        (command.name, key)
        for key, setting in find_settings(cli).items()
        for command, _ in setting.uses
    ]


def test_the_lists_hold_every_key():
    assert set(find_settings(cli)) == PUSHED.keys() | TAKEN.keys() | HELD.keys()


@pytest.mark.parametrize(("name", "key"), uses())
def test_a_key_that_a_command_takes_acts_there(tmp_path, monkeypatch, values, name, key):
    beside = {one: values(text) for one, text in BESIDE.get(key, {}).items()}
    if key == "fleet.node_id":
        beside["agent.node"] = "n1"
    plain = take(name, write(tmp_path, BASE | beside))
    if key in HELD:
        value, read = HELD[key]
        monkeypatch.setenv(find_settings(cli)[key].variables[0], "")
        take(name, write(tmp_path, BASE | {key: value}))
        assert read() == value
        return
    text = values(PUSHED.get(key) or TAKEN[key])
    config, settings = take(name, write(tmp_path, BASE | beside | {key: text}))
    assert config != plain[0]
    if key in PUSHED:
        assert settings != plain[1]


@pytest.mark.parametrize("name", OTHERS_ONLY)
def test_a_key_of_a_shared_section_that_a_command_does_not_take_is_said(tmp_path, values, name):
    taken = {key for command, key in uses() if command == name}
    every = {key: values(text) for key, text in (PUSHED | TAKEN).items()}
    every |= {key: value for key, (value, _) in HELD.items()}
    found = load_settings(Path(write(tmp_path, every)), cli)
    said = [line for line in found.iter_warnings(cli.commands[name]) if "no effect" in line]
    assert {line.split(": ")[1] for line in said} == OTHERS_ONLY[name]
    own = {"trace": "fleet_push.", "fleet-push": "trace."}[name]
    assert {key for key in every if not key.startswith(own)} == taken | OTHERS_ONLY[name]
