"""The whole file: everything wrong is said at once, and what is right is resolved."""

from pathlib import Path

import pytest

from ingero.config.document import parse_document
from ingero.errors import ConfigError
from ingero.fleet.builtin import FACTORIES
from ingero.fleet.component import ComponentId, ComponentKind
from ingero.fleet.config import build_config
from ingero.fleet.defaults import write_defaults

SEED = Path(__file__).parents[1] / "data" / "config" / "seed-readme.yaml"
GOOD = """
receivers:
  otlp: {protocols: {http: }}
processors:
  batch:
  batch/small: {send_batch_size: 10}
exporters:
  debug:
  file: {path: /tmp/x}
service:
  pipelines:
    metrics: {receivers: [otlp], processors: [batch/small, batch], exporters: [debug]}
    metrics/two: {receivers: [otlp], exporters: [debug]}
    traces: {receivers: [otlp], exporters: [debug]}
"""


def _build(text):
    return build_config(parse_document(text, environ={}), FACTORIES)


def _say(text):
    with pytest.raises(ConfigError) as caught:
        _build(text)
    return [str(one) for one in caught.value.problems]


def test_names_are_resolved_and_each_component_runs_once():
    config = _build(GOOD)
    assert [f"{one.signal}/{one.name}" for one in config.pipelines] == [
        "metrics/", "metrics/two", "traces/",
    ]  # fmt: skip
    assert config.pipelines[0].processors == (ComponentId("batch", "small"), ComponentId("batch"))
    assert config.used(ComponentKind.RECEIVER) == (ComponentId("otlp"),)
    assert config.used(ComponentKind.EXPORTER) == (ComponentId("debug"),)
    assert [one.path for one in config.warnings] == ["exporters.file"]


def test_every_problem_of_a_file_is_said_at_once_in_its_order():
    found = _say("""
receivers:
  otpl: {protocols: {http: }}
processors:
  batch: {send_batch_sise: 10}
  "bad id": {}
exporters:
  debug: [1]
  file: {}
extension: {}
service:
  extensions: [zpages]
  pipelines:
    metric: {receivers: [otlp], exporters: [debug]}
    logs: {receivers: [otlp], processors: [batch, batch, nope], exporters: []}
  telemtry: {}
""")
    assert found == [
        "line 3: receivers.otpl: unknown receiver type 'otpl' (did you mean otlp?)",
        "line 5: processors.batch.send_batch_sise: unknown key (did you mean send_batch_size?)",
        "line 6: processors.bad id: is not a component id (write type or type/name)",
        "line 8: exporters.debug: is not a mapping of settings",
        "line 9: exporters.file.path: is required (The file.)",
        "line 10: extension: unknown section (did you mean extensions?)",
        "line 16: service.telemtry: unknown key (did you mean telemetry?)",
    ]


def test_pipelines_are_checked_against_what_is_defined():
    found = _say("""
receivers:
  otlp: {protocols: {http: }}
processors:
  batch:
exporters:
  debug:
  prometheus: {endpoint: ':0'}
service:
  extensions: [zpages]
  pipelines:
    metric: {receivers: [otlp], exporters: [debug]}
    logs: {receivers: [otlp], processors: [batch, batch, nope], exporters: []}
    traces: {receivers: [], exporters: [prometheus]}
""")
    assert found == [
        "line 10: service.extensions.0: 'zpages' is not defined under extensions",
        "line 12: service.pipelines.metric: 'metric' is not a signal (did you mean metrics?)",
        "line 13: service.pipelines.logs: has no exporters (a pipeline needs at least one)",
        "line 13: service.pipelines.logs.processors.1: 'batch' stands twice in this list",
        "line 13: service.pipelines.logs.processors.2: 'nope' is not defined under processors (known here: batch)",
        "line 14: service.pipelines.traces: has no receivers (a pipeline needs at least one)",
        "line 14: service.pipelines.traces.exporters: prometheus cannot be in a traces pipeline (it takes metrics)",
    ]


def test_empty_file_says_what_is_missing():
    assert _say("") == ["service: is required (it names the pipelines to run)"]
    assert "service.pipelines: there is none" in _say("service: {}")[0]


def test_missing_variable_hides_what_follows_from_it():
    text = GOOD.replace(
        "send_batch_size: 10", "send_batch_size: 10}\n  batch/x: {timeout: "
    ).replace("{timeout: }", "\n    timeout: ${env:NOPE}")
    assert [one for one in _say(text) if "batch/x" in one] == [
        "line 8: processors.batch/x.timeout: the environment has no NOPE (set it, or write ${env:NOPE:-default})"
    ]


@pytest.mark.parametrize(
    ("telemetry", "expected"),
    [
        ("", ["localhost:8888"]),
        ("telemetry: {metrics: {address: ':9999'}}", [":9999"]),
        ("telemetry: {metrics: {level: none}}", []),
        (
            "telemetry: {metrics: {readers: [{pull: {exporter: {prometheus: {host: 0.0.0.0, port: 1234}}}}]}}",
            ["0.0.0.0:1234"],
        ),
        ("telemetry: {metrics: {address: ':1', readers: []}}", []),
    ],
)
def test_own_metrics_are_where_either_form_says(telemetry, expected):
    config = _build(GOOD + f"  {telemetry}\n")
    assert [str(one) for one in config.service.telemetry.metrics.endpoints] == expected


def test_log_settings_and_shutdown_timeout_are_read():
    config = _build(
        GOOD + "  shutdown_timeout: 3s\n  telemetry: {logs: {level: WARN, encoding: json}}\n"
    )
    assert config.service.shutdown_timeout == 3_000_000_000
    assert config.service.telemetry.logs.level == "WARN"


def test_seed_readme_is_valid_as_it_is_without_warnings():
    config = _build(SEED.read_text())
    assert config.warnings == ()


def test_printed_defaults_are_valid_and_name_every_component():
    text = write_defaults(FACTORIES)
    config = _build(text)
    assert config.warnings == ()
    for factory in FACTORIES:
        assert f"{factory.type}:" in text


def test_commented_components_of_the_defaults_are_valid_once_uncommented():
    lines = []
    for line in write_defaults(FACTORIES).splitlines():
        stripped = line.lstrip()
        is_top = line.startswith("  # ") and not line.startswith("service")
        lines.append("  " + line[4:] if is_top and not stripped.startswith("# #") else line)
    document = parse_document("\n".join(lines), environ={"INGERO_TOKEN": "x"})
    config = build_config(document, FACTORIES)
    assert {one.path.partition(".")[2] for one in config.warnings} >= {"batch", "file", "otlphttp"}


WIRED = """
receivers:
  otlp: {protocols: {http: {endpoint: "localhost:4318", auth: {authenticator: %s}, middlewares: [{id: %s}]}}}
exporters: {debug: }
extensions: {bearertokenauth/a: {token: t}, bearertokenauth/b: {token: t}, ingero_threshold: }
service:
  extensions: [bearertokenauth/a, ingero_threshold]
  pipelines: {metrics: {receivers: [otlp], exporters: [debug]}}
"""


def test_extension_that_a_component_names_must_be_defined_and_run():
    _build(WIRED % ("bearertokenauth/a", "ingero_threshold"))
    at = "line 3: receivers.otlp.protocols.http"
    assert _say(WIRED % ("nobody", "bearertokenauth/b")) == [
        f"{at}.auth.authenticator: 'nobody' is not defined under extensions (define it there and list it under service.extensions)",
        f"{at}.middlewares.0.id: 'bearertokenauth/b' does not run (list it under service.extensions)",
    ]


@pytest.mark.parametrize(
    ("http", "grpc", "is_same"),
    [
        ("localhost:4317", "127.0.0.1:4317", True),
        ("0.0.0.0:4317", "10.1.2.3:4317", True),
        (":4317", "localhost:4317", True),
        ("10.1.2.3:4317", "localhost:4317", False),
        ("localhost:0", "localhost:0", False),
    ],
)
def test_two_ports_that_cannot_both_be_had_are_refused(http, grpc, is_same):
    text = f"""
receivers: {{otlp: {{protocols: {{http: {{endpoint: "{http}"}}, grpc: {{endpoint: "{grpc}"}}}}}}}}
exporters: {{debug: , prometheus: {{endpoint: ":8888"}}}}
service: {{pipelines: {{metrics: {{receivers: [otlp], exporters: [debug]}}}}}}
"""
    if not is_same:
        _build(text)
        return
    (found,) = _say(text)
    assert found.startswith(f"line 2: receivers.otlp.protocols.http.endpoint: {http} is where ")
    assert "receivers.otlp.protocols.grpc.endpoint listens (give each a port of its own)" in found


def test_port_of_the_own_metrics_cannot_be_had_twice():
    text = """
receivers: {otlp: {protocols: {http: }}}
exporters: {prometheus: {endpoint: "0.0.0.0:8888"}}
service: {pipelines: {metrics: {receivers: [otlp], exporters: [prometheus]}}}
"""
    assert "0.0.0.0:8888 is where service.telemetry.metrics listens" in _say(text)[0]


def test_bound_of_a_duration_is_told_as_a_duration():
    text = """
receivers: {otlp: {protocols: {http: }}}
processors: {ingero: {push_interval: 0s}}
exporters: {debug: }
service: {pipelines: {metrics: {receivers: [otlp], processors: [ingero], exporters: [debug]}}}
"""
    assert _say(text) == [
        "line 3: processors.ingero.push_interval: should be at least 1 s (got '0s')"
    ]


def test_document_that_is_too_large_is_named():
    lists = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
    )
    with pytest.raises(ConfigError) as caught:
        parse_document(lists, source="fleet.yaml", environ={})
    assert str(caught.value) == "fleet.yaml: line 1: more than 100000 values"


def test_keys_of_the_collector_that_mean_nothing_here_say_what_to_do():
    text = """
receivers: {otlp: {protocols: {http: {include_metadata: true, cors: {}}}}}
processors: {batch: {metadata_keys: [x]}}
exporters: {debug: }
connectors: {forward: }
service:
  pipelines: {metrics: {receivers: [otlp], processors: [batch], exporters: [debug]}}
  telemetry: {resource: {a: b}}
"""
    found = "\n".join(_say(text))
    for hint in (
        "no component here reads what it would pass on",
        "browsers do not push here",
        "batches of all senders are joined",
        "pipelines cannot feed each other here",
        "own metrics have no resource attributes",
    ):
        assert hint in found
