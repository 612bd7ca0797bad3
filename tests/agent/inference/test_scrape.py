"""The metrics of serving engines, read over HTTP from pages as the engines publish them.

No engine runs here. vLLM and SGLang make their pages with ``prometheus_client``, so theirs are made with it, with the
names, labels and buckets of the projects' sources; TGI's (Rust) and Triton's (C++) are written out in the form of those
libraries. Numbers are ours. Sources: vllm/v1/metrics/loggers.py and docs/usage/metrics.md (vllm-project/vllm);
docs/references/production_metrics.md (sgl-project/sglang); docs/source/reference/metrics.md
(huggingface/text-generation-inference); docs/user_guide/metrics.md (triton-inference-server/server).
"""

import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ingero.agent.inference import pages, scrape
from ingero.agent.inference.engines import SGLANG, TGI, TRITON, VLLM, find_engine, find_option
from ingero.agent.inference.pages import read_page
from ingero.agent.inference.scrape import (
    EngineScraper,
    EngineState,
    ScrapeOutcome,
    ScrapeSettings,
    find_engines,
)
from ingero.agent.inference.series import iter_inference_series, read_losses
from ingero.agent.inference.watch import InferenceSettings, InferenceWatch
from ingero.agent.metrics.exporting import PrometheusPage, build_export
from ingero.agent.metrics.series import Distribution
from ingero.cli.commands.trace.inference import describe_engine
from ingero.errors import BadDataError
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def page_of_vllm():
    registry = CollectorRegistry()
    labels, values = (
        ("model_name", "engine"),
        [(MODEL, "0"), (MODEL, "1")],
    )  # two data-parallel engines
    first = Histogram(
        "vllm:time_to_first_token_seconds",
        "TTFT.",
        labels,
        registry=registry,
        buckets=(0.1, 0.25, 1.0),
    )
    token = Histogram(
        "vllm:inter_token_latency_seconds", "ITL.", labels, registry=registry, buckets=(0.01, 0.025)
    )
    prompt = Counter("vllm:prompt_tokens", "Prefill tokens.", labels, registry=registry)
    done = Counter(
        "vllm:request_success", "Finished.", (*labels, "finished_reason"), registry=registry
    )
    running = Gauge("vllm:num_requests_running", "Running.", labels, registry=registry)
    cache = Gauge("vllm:kv_cache_usage_perc", "Used.", labels, registry=registry)
    Gauge("vllm:cache_config_info", "Config.", ("block_size",), registry=registry).labels("16").set(
        1
    )
    for at, value in enumerate(values):
        for seconds in (0.05, 0.2, 3.0):
            first.labels(*value).observe(seconds)
        token.labels(*value).observe(0.02)
        prompt.labels(*value).inc(100 + at)
        running.labels(*value).set(3 + at)
        cache.labels(*value).set(0.5 + 0.25 * at)
        done.labels(*value, "stop").inc(2)
        done.labels(*value, "length").inc(1)
    return generate_latest(registry).decode()


def page_of_sglang():
    registry = CollectorRegistry()
    labels = ("model_name",)
    Counter("sglang:prompt_tokens", "Prefill.", labels, registry=registry).labels(MODEL).inc(
        8.128902e06
    )
    Gauge("sglang:token_usage", "Usage.", labels, registry=registry).labels(MODEL).set(0.28)
    Gauge("sglang:num_queue_reqs", "Waiting.", labels, registry=registry).labels(MODEL).set(2826)
    request = Histogram(
        "sglang:e2e_request_latency_seconds", "E2E.", labels, registry=registry, buckets=(1, 10)
    )
    for seconds in (0.5, 5, 50):
        request.labels(MODEL).observe(seconds)
    older = Histogram(
        "sglang:time_per_output_token_seconds", "TPOT.", labels, registry=registry, buckets=(0.05,)
    )
    older.labels(MODEL).observe(0.04)
    return generate_latest(registry).decode()


PAGE_OF_TGI = """\
# TYPE tgi_request_success counter
tgi_request_success 41

# TYPE tgi_queue_size gauge
tgi_queue_size 7

# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 12

# TYPE tgi_batch_forward_duration histogram
tgi_batch_forward_duration_bucket{method="prefill",le="0.1"} 3
tgi_batch_forward_duration_bucket{method="prefill",le="+Inf"} 5
tgi_batch_forward_duration_sum{method="prefill"} 1.5
tgi_batch_forward_duration_count{method="prefill"} 5
tgi_batch_forward_duration_bucket{method="decode",le="0.1"} 100
tgi_batch_forward_duration_bucket{method="decode",le="+Inf"} 100
tgi_batch_forward_duration_sum{method="decode"} 2.25
tgi_batch_forward_duration_count{method="decode"} 100

# TYPE tgi_request_generated_tokens histogram
tgi_request_generated_tokens_bucket{le="64"} 40
tgi_request_generated_tokens_bucket{le="+Inf"} 41
tgi_request_generated_tokens_sum 1234
tgi_request_generated_tokens_count 41

"""
PAGE_OF_TRITON = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="ensemble",version="1"} 161
nv_inference_request_success{model="bert",version="1"} 20
nv_inference_request_success{model="bert",version="2"} 22
# HELP nv_inference_queue_duration_us Cumulative inference queuing duration in microseconds (includes cached requests)
# TYPE nv_inference_queue_duration_us counter
nv_inference_queue_duration_us{model="ensemble",version="1"} 11110
# HELP nv_gpu_utilization GPU utilization rate [0.0 - 1.0)
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-1"} 0.78
"""


def told(page, engine):
    """Numbers of a page by name and model."""
    return {
        (metric.name, model): number
        for (metric, model), number in read_page(page, engine).numbers.items()
    }


def test_a_page_of_vllm_with_two_engines_is_added_up():
    found = told(page_of_vllm(), VLLM)
    first = found["gen_ai.server.time_to_first_token", MODEL]
    assert first == Distribution((0.1, 0.25, 1.0), (2, 2, 0, 2), pytest.approx(6.5))
    assert found["gen_ai.server.time_per_output_token", MODEL].counts == (0, 2, 0)
    assert found["gen_ai.token.usage.input", MODEL] == 201
    assert found["gen_ai.server.request.success", MODEL] == 6
    assert found["gen_ai.server.batch.size", MODEL] == 7
    assert found["gen_ai.server.kv_cache.utilization", MODEL] == 0.75  # the fuller one's


def test_a_page_of_sglang_is_read_with_the_names_of_its_older_releases():
    found = told(page_of_sglang(), SGLANG)
    assert found["gen_ai.token.usage.input", MODEL] == 8_128_902
    assert found["gen_ai.server.queue.size", MODEL] == 2826
    assert found["gen_ai.server.request.duration", MODEL].counts == (1, 1, 1)
    assert found["gen_ai.server.time_per_output_token", MODEL].counts == (1, 0)


def test_a_page_of_tgi_has_its_phases_apart():
    found = told(PAGE_OF_TGI, TGI)
    assert found["gen_ai.server.request.duration.prefill", ""] == Distribution((0.1,), (3, 2), 1.5)
    assert found["gen_ai.server.request.duration.decode", ""] == Distribution(
        (0.1,), (100, 0), 2.25
    )
    assert found["gen_ai.token.usage.output", ""] == 1234
    assert found["gen_ai.server.request.success", ""] == 41


def test_a_page_of_triton_has_a_number_for_each_model():
    found = told(PAGE_OF_TRITON, TRITON)
    assert found == {
        ("gen_ai.server.request.success", "ensemble"): 161,
        ("gen_ai.server.request.success", "bert"): 42,
        ("gen_ai.server.queue.time", "ensemble"): pytest.approx(0.01111),
    }


@pytest.mark.parametrize(
    "page",
    [
        "<html>not found</html>",
        'vllm:num_requests_running{model_name="x} 1',
        "vllm:num_requests_running NaN",
        "vllm:num_requests_running 1e999",
        '# TYPE vllm:time_to_first_token_seconds histogram\nvllm:time_to_first_token_seconds_bucket{le="1"} 5\n',
        (
            '# TYPE vllm:time_to_first_token_seconds histogram\nvllm:time_to_first_token_seconds_bucket{le="1"} 5\n'
            'vllm:time_to_first_token_seconds_bucket{le="+Inf"} 4\n'
        ),
    ],
)
def test_a_page_that_cannot_be_read_is_bad_data(page):
    with pytest.raises(BadDataError):
        read_page(page, VLLM)


TTFT = "vllm:time_to_first_token_seconds"


@pytest.mark.parametrize(
    "lines",
    [
        ['vllm:kv_cache_usage_perc{model_name="x"} NaN'],
        ['vllm:prompt_tokens_total{model_name="x"} -3'],
        ['vllm:num_requests_waiting{e="0"} 1e308', 'vllm:num_requests_waiting{e="1"} 1e308'],
        [f'{TTFT}_bucket{{le="1"}} 5'],
        [f'{TTFT}_bucket{{le="NaN"}} 5', f'{TTFT}_bucket{{le="+Inf"}} 5'],
        [f'{TTFT}_bucket{{le="1"}} 5', f'{TTFT}_bucket{{le="+Inf"}} 5', f"{TTFT}_sum NaN"],
    ],
    ids=["not a number", "negative", "too large", "no last bucket", "no bound", "sum"],
)
def test_a_metric_that_cannot_be_read_leaves_the_others_of_its_page(lines):
    page = read_page("\n".join([*lines, "vllm:num_requests_running 4", ""]), VLLM)
    assert {metric.name: number for (metric, _), number in page.numbers.items()} == {
        "gen_ai.server.batch.size": 4
    }
    assert page.unreadable == {lines[0].split("{")[0].removesuffix("_bucket")}


def test_a_line_that_is_too_long_is_refused_before_it_is_parsed():
    """The parser's time grows with the square of a line's labels: 300 000 of them took 90 seconds."""
    page = "a{" + ",".join(f'l{i}="v"' for i in range(100_000)) + "} 1\n"
    began_s = time.monotonic()
    with pytest.raises(BadDataError, match="a line of"):
        read_page(page, VLLM)
    assert time.monotonic() - began_s < 5


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("python3 -m vllm.entrypoints.openai.api_server --model x", VLLM),
        ("/usr/bin/python3 /opt/bin/vllm serve meta/x --port 9000", VLLM),
        ("python -m sglang.launch_server --model-path x", SGLANG),
        ("text-generation-launcher --model-id x", TGI),
        ("/opt/tritonserver/bin/tritonserver --model-repository=/m", TRITON),
        ("vim vllm.py", None),
        ("python train.py --comment vllm", None),
        ("", None),
    ],
)
def test_engines_are_recognised_by_their_command_lines(line, engine):
    assert find_engine(line.split()) is engine


def test_options_are_read_in_both_forms():
    assert find_option(["vllm", "--port", "9000"], ("--port",)) == "9000"
    assert find_option(["vllm", "--port=9001"], ("--port",)) == "9001"
    assert find_option(["vllm", "--port"], ("--port",)) == ""


def write_process(proc, pid, line, *, start_ticks=0):
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "cmdline").write_bytes("\0".join(line.split()).encode() + b"\0")
    if start_ticks:
        (folder / "stat").write_text(f"{pid} (a (b) c) S {'0 ' * 18}{start_ticks} 0\n")


def test_each_port_is_one_engine_and_a_wrong_port_is_the_usual_one(tmp_path):
    write_process(tmp_path, 5, "vllm serve a --port 9000")
    write_process(tmp_path, 6, "vllm serve a --port 9000")  # a fork of it
    write_process(tmp_path, 7, "tritonserver --metrics-port=99999")
    write_process(tmp_path, 8, "bash")
    found = [(one.engine, one.pid, one.port) for one in find_engines([8, 7, 6, 5, 4], tmp_path)]
    assert found == [(VLLM, 5, 9000), (TRITON, 7, 8002)]


@pytest.mark.parametrize(
    ("line", "environ", "port"),
    [
        ("text-generation-launcher", None, 3000),  # ended, or not ours to read
        ("text-generation-launcher", b"", 3000),
        ("text-generation-launcher", b"A=1\0PORT=80\0", 80),
        ("text-generation-launcher --port 8080", b"PORT=80\0", 8080),
        ("text-generation-launcher", b"PORT=tcp://10.0.0.1:80\0", 3000),
        ("text-generation-launcher", b"PORT=99999\0", 3000),
        ("vllm serve a", b"PORT=80\0", 8000),  # no variable of its own
        (f"vllm serve a --port {'9' * 5000}", None, 8000),
    ],
)
def test_a_port_is_that_of_an_option_else_of_the_environment_of_tgi_else_the_default(
    tmp_path, line, environ, port
):
    write_process(tmp_path, 5, line)
    if environ is not None:
        (tmp_path / "5" / "environ").write_bytes(environ)
    assert [one.port for one in find_engines([5], tmp_path)] == [port]


def test_the_server_that_tgi_starts_is_no_engine_of_its_own(tmp_path):
    write_process(tmp_path, 5, "text-generation-launcher")
    write_process(tmp_path, 6, "text-generation-router --port 3000 --master-shard-uds-path /s-0")
    assert [(one.pid, one.port) for one in find_engines([5, 6], tmp_path)] == [(5, 3000)]


@contextmanager
def serve(answer):
    """A real HTTP server on a free port; ``answer`` gives status and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answer()
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """A /proc of engines that the tests write."""
    look = find_engines
    monkeypatch.setattr(scrape, "find_engines", lambda pids: look(pids, tmp_path))
    return tmp_path


def scraper_of(said, clock, pids):
    return EngineScraper(ScrapeSettings(), clock, said.append, pids=lambda: pids)


def test_an_engine_is_found_read_and_shown_and_each_failure_is_counted_and_told_once(proc):
    answers = {
        "page": (200, page_of_vllm().encode()), "html": (200, b"<html>"), "away": (302, b""),
        "large": (200, b"#" * (scrape.MAX_PAGE_BYTES + 1)), "other": (200, PAGE_OF_TRITON.encode()),
    }  # fmt: skip
    now = ["page"]
    said, clock = [], ManualClock()
    with serve(lambda: answers[now[0]]) as port, scraper_of(said, clock, [5]) as scraper:
        write_process(proc, 5, f"vllm serve {MODEL} --port {port}")
        for name in ("page", "html", "html", "away", "large", "other", "page"):
            now[0] = name
            scraper.scrape_due()
            series = {one.name: one for one in scraper.iter_series()}
            assert ("gen_ai.server.batch.size" in series) == (
                name == "page"
            )  # absent is not what it was
        outcomes = {
            dict(labels)["outcome"]: n for labels, n in series["ingero.infer.scrapes"].points
        }
        assert outcomes == {
            "taken": 2,
            "malformed": 2,
            "refused": 1,
            "too_large": 1,
            "unknown_metrics": 1,
        }
        page = PrometheusPage()
        page.take(tuple(scraper.iter_series()), 0)
        labels = f'model="{MODEL}",port="{port}",system="vllm"'
        assert f"gen_ai_server_batch_size{{{labels}}} 7\n" in page.render()
        assert f"gen_ai_token_usage_input_total{{{labels}}} 201\n" in page.render()
        assert "gen_ai_server_time_to_first_token_seconds_bucket{" in page.render()
    assert [text.split(": ", 1)[1].split(" ")[:4] for text in said[1:]] == [
        ["its", "metrics", "are", "not"],
        ["its", "metrics", "are", "not"],
        ["its", "metrics", "are", "not"],
        ["its", "metrics", "are", "not"],
        ["its", "metrics", "are", "read"],
    ]
    assert said[0] == f"vllm (pid 5): its metrics are read on port {port}"
    assert "answers 302" in said[2]
    assert f"over {scrape.MAX_PAGE_BYTES} bytes" in said[3]


def test_an_engine_that_does_not_listen_is_unreachable_and_one_that_ended_is_gone(proc):
    said, clock, pids = [], ManualClock(), [5]
    with serve(lambda: (200, b"")) as port:
        pass  # the port is free again
    with scraper_of(said, clock, pids) as scraper:
        write_process(proc, 5, f"tritonserver --metrics-port {port}")
        scraper.scrape_due()
        (state,) = scraper.engines
        assert state.outcomes == {ScrapeOutcome.UNREACHABLE: 1}
        pids.clear()
        scraper.scrape_due()
        assert len(scraper.engines) == 1  # processes are looked at every thirty seconds
        clock.advance(30 * NS_PER_S)
        scraper.scrape_due()
        assert scraper.engines == ()
        assert list(scraper.iter_series()) == []


def starts_of(scraper):
    """Start of what an engine counted, as it is pushed, in seconds by name and model; the trace began at 7."""
    some = [one for one in scraper.iter_series() if one.name.startswith("gen_ai.")]
    export = build_export(some, {}, 7 * NS_PER_S, (WALL_S + 3600) * NS_PER_S)
    found = {}
    for metric in export.root.resource_metrics[0].scope_metrics[0].metrics:
        sums = metric.histogram or metric.sum
        for point in sums.data_points if sums else ():
            labels = {item.key: item.value.string_value for item in point.attributes}
            start_s = point.start_time_unix_nano / NS_PER_S
            found[metric.name, labels["gen_ai.request.model"]] = start_s
    return found


TOKENS = 'vllm:prompt_tokens_total{{model_name="{}"}} {}\n'
WALL_S = ManualClock().wall_ns() // NS_PER_S


@pytest.mark.parametrize(
    ("more", "stat", "start_s"),
    [
        (f"process_start_time_seconds {WALL_S - 60}.5\n", True, WALL_S - 60 + 0.5),
        ("", True, 1_700_000_012.34),
        ("process_start_time_seconds NaN\n", True, 1_700_000_012.34),
        (f"process_start_time_seconds {WALL_S + 60}\n", True, 1_700_000_012.34),  # not yet
        ("", False, 0),
    ],
    ids=["page", "process", "nan", "future", "unknown"],
)
def test_sums_of_an_engine_begin_with_it_and_not_with_the_trace(proc, more, stat, start_s):
    if stat:
        (proc / "stat").write_text("cpu 1 2\nbtime 1700000000\n")
    page = (TOKENS.format("a", 5_000_000_000) + more + PAGE_OF_TTFT).encode()
    with (
        serve(lambda: (200, page)) as port,
        scraper_of([], ManualClock(), [5]) as scraper,
    ):
        write_process(proc, 5, f"vllm serve a --port {port}", start_ticks=1234)
        scraper.scrape_due()
        assert starts_of(scraper) == {
            ("gen_ai.token.usage.input", "a"): pytest.approx(start_s, abs=1e-6),
            ("gen_ai.server.time_to_first_token", "a"): pytest.approx(start_s, abs=1e-6),
        }


PAGE_OF_TTFT = """\
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{model_name="a",le="+Inf"} 3
vllm:time_to_first_token_seconds_sum{model_name="a"} 1.5
"""


def test_a_sum_that_fell_begins_anew_with_the_others_of_its_model(proc):
    """Also after a page that could not be read, and without the sums of a model that did not fall."""
    texts = [
        TOKENS.format("a", 100) + TOKENS.format("b", 100) + PAGE_OF_TTFT,
        "<html>",
        TOKENS.format("a", 99) + TOKENS.format("b", 100) + PAGE_OF_TTFT,
        TOKENS.format("a", 100) + TOKENS.format("b", 101) + PAGE_OF_TTFT,
        TOKENS.format("a", 101) + TOKENS.format("b", 101) + PAGE_OF_TTFT.replace("} 3", "} 2"),
    ]
    clock, found = ManualClock(), []
    with (
        serve(lambda: (200, texts[len(found)].encode())) as port,
        scraper_of([], clock, [5]) as scraper,
    ):
        write_process(proc, 5, f"vllm serve a --port {port}")
        for _ in texts:
            scraper.scrape_due()
            found.append(starts_of(scraper))
            clock.advance(10 * NS_PER_S)
    tokens = ("gen_ai.token.usage.input", "a")
    assert [one.get(tokens) for one in found] == [0, None, WALL_S + 20, WALL_S + 20, WALL_S + 40]
    assert found[4]["gen_ai.server.time_to_first_token", "a"] == WALL_S + 40
    assert {one.get(("gen_ai.token.usage.input", "b")) for one in found} == {0, None}


def test_a_page_that_names_another_start_begins_anew(proc):
    texts = [
        TOKENS.format("a", 1) + f"process_start_time_seconds {WALL_S - 90}\n",
        TOKENS.format("a", 1) + f"process_start_time_seconds {WALL_S - 30}\n",
    ]
    with (
        serve(lambda: (200, texts.pop(0).encode())) as port,
        scraper_of([], ManualClock(), [5]) as scraper,
    ):
        write_process(proc, 5, f"vllm serve a --port {port}")
        scraper.scrape_due()
        assert set(starts_of(scraper).values()) == {WALL_S - 90}
        scraper.scrape_due()
        assert set(starts_of(scraper).values()) == {WALL_S - 30}


@pytest.mark.parametrize(
    ("pid", "model", "start_ticks"),
    [(6, "a", 1234), (5, "b", 1234), (5, "a", 9999)],
    ids=["pid", "model", "reused-pid"],
)
def test_an_engine_that_was_restarted_on_its_port_is_another_one(proc, pid, model, start_ticks):
    """With its own model, process and start, and without the old one's numbers; readings stay counted."""
    (proc / "stat").write_text("btime 1700000000\n")
    answers = [(200, PAGE_OF_TGI.encode()), (503, b""), (200, PAGE_OF_TGI.encode())]
    said, clock, pids = [], ManualClock(), [5]
    with serve(lambda: answers.pop(0)) as port, scraper_of(said, clock, pids) as scraper:
        line = f"text-generation-launcher --port {port} --model-id"
        write_process(proc, 5, f"{line} a", start_ticks=1234)
        scraper.scrape_due()
        write_process(proc, pid, f"{line} {model}", start_ticks=start_ticks)
        pids[:] = [pid]
        clock.advance(30 * NS_PER_S)
        scraper.scrape_due()
        (state,) = scraper.engines
        assert (state.pid, state.model, dict(state.reading.numbers)) == (pid, model, {})
        scraper.scrape_due()
    assert set(starts_of(scraper).items()) > {
        (("gen_ai.server.request.success", model), 1_700_000_000 + start_ticks / 100)
    }
    assert state.outcomes == {ScrapeOutcome.TAKEN: 2, ScrapeOutcome.REFUSED: 1}
    assert said[1] == f"tgi (pid {pid}): another one than before is read on port {port}"


def test_readings_stay_counted_when_an_engine_was_away(proc):
    clock, pids = ManualClock(), [5]
    with (
        serve(lambda: (200, PAGE_OF_TGI.encode())) as port,
        scraper_of([], clock, pids) as scraper,
    ):
        write_process(proc, 5, f"text-generation-launcher --port {port}")
        for known in ([5], [], [5]):
            pids[:] = known
            scraper.scrape_due()
            clock.advance(30 * NS_PER_S)
        assert scraper.engines[0].outcomes == {ScrapeOutcome.TAKEN: 2}


def test_of_processes_with_one_port_the_first_that_started_is_the_engine(tmp_path):
    """A fork may have the lower number once numbers have begun anew."""
    (tmp_path / "stat").write_text("btime 1700000000\n")
    write_process(tmp_path, 5, "vllm serve a", start_ticks=2000)
    write_process(tmp_path, 9, "vllm serve a", start_ticks=1000)
    assert [one.pid for one in find_engines([5, 9], tmp_path)] == [9]


def page_of_models(models):
    """Triton's page of models that have served once each; they wait in a queue of one."""
    names = ("nv_inference_request_success", "nv_inference_pending_request_count")
    return "".join(f'{name}{{model="{model}"}} 1\n' for name in names for model in models)


def test_models_beyond_the_bound_are_counted_and_noted_once_and_those_that_are_known_stay(
    proc, monkeypatch
):
    monkeypatch.setattr(pages, "MAX_MODELS", 2)
    queue_only = 'nv_inference_pending_request_count{model="a"} 3\n'
    loads = [
        page_of_models(["d", "c"]),
        queue_only + page_of_models(["b", "c", "d"]),  # two were loaded that come first by name
        queue_only + page_of_models(["b", "c", "d"]),
        page_of_models(["b", "d"]),  # one was unloaded
        page_of_models(["b", "c", "d"]),
    ]
    said, clock, found = [], ManualClock(), []
    with (
        serve(lambda: (200, loads[len(found)].encode())) as port,
        scraper_of(said, clock, [5]) as scraper,
    ):
        write_process(proc, 5, f"tritonserver --metrics-port {port}")
        for _ in loads:
            scraper.scrape_due()
            series = {one.name: one for one in scraper.iter_series()}
            models = [
                {dict(labels)["gen_ai.request.model"] for labels, _ in series[name].points}
                for name in ("gen_ai.server.request.success", "gen_ai.server.queue.size")
            ]
            assert models[0] == models[1]
            losses = read_losses(InferenceWatch(InferenceSettings(), print), scraper)
            found.append(("".join(sorted(models[0])), losses["models_not_read"]))
    assert found == [("cd", 0), ("cd", 2), ("cd", 2), ("bd", 2), ("bd", 3)]
    assert said[1:] == [f"triton on port {port}: 2 of its models are not read, as 2 are the most"]


def test_engines_beyond_the_bound_are_counted_and_named_and_those_that_started_first_stay(
    proc, monkeypatch
):
    monkeypatch.setattr(scrape, "MAX_ENGINES", 2)
    said, clock, pids = [], ManualClock(), [5, 6]
    with serve(lambda: (500, b"")) as port, scraper_of(said, clock, pids) as scraper:
        for pid in range(5, 10):
            write_process(proc, pid, f"tritonserver --metrics-port {port + pid}")
        found = []
        for more in ([], [7], [], [8, 9]):
            pids += more
            scraper.scrape_due()
            clock.advance(60 * NS_PER_S)
            losses = read_losses(InferenceWatch(InferenceSettings(), print), scraper)
            found.append(([one.pid for one in scraper.engines], losses["engines_not_read"]))
    assert found == [([5, 6], 0), ([5, 6], 1), ([5, 6], 1), ([5, 6], 3)]
    assert [line for line in said if "are the most" in line] == [
        f"the metrics of 1 more engine are not read, as 2 are the most: triton on port {port + 7}",
        (
            f"the metrics of 3 more engines are not read, as 2 are the most: triton on port {port + 7}, "
            f"triton on port {port + 8}, triton on port {port + 9}"
        ),
    ]


def test_metrics_that_cannot_be_read_are_counted_and_named_once(proc):
    usual = "vllm:num_requests_running 4\n"
    loads = [
        usual,
        usual + "vllm:kv_cache_usage_perc NaN\n",
        usual + "vllm:kv_cache_usage_perc NaN\n",
    ]
    said, found = [], []
    with (
        serve(lambda: (200, loads[len(found)].encode())) as port,
        scraper_of(said, ManualClock(), [5]) as scraper,
    ):
        write_process(proc, 5, f"vllm serve x --port {port}")
        for _ in loads:
            scraper.scrape_due()
            losses = read_losses(InferenceWatch(InferenceSettings(), print), scraper)
            found.append(losses["metrics_not_read"])
    assert found == [0, 1, 1]
    assert said[1:] == [
        f"vllm on port {port}: metrics that are no numbers are left out: vllm:kv_cache_usage_perc"
    ]


def test_losses_are_one_series_with_those_of_the_engines(proc):
    lines = page_of_models([f"{i:04}" for i in range(1000)])
    with (
        serve(lambda: (200, lines.encode())) as port,
        scraper_of([], ManualClock(), [5]) as scraper,
    ):
        write_process(proc, 5, f"tritonserver --metrics-port {port}")
        scraper.scrape_due()
        watch = InferenceWatch(InferenceSettings(), print)
        series = {one.name: one for one in iter_inference_series(watch, scraper)}
        (state,) = scraper.engines
        text = describe_engine(state)
    lost = {dict(labels)["what"]: n for labels, n in series["ingero.infer.lost"].points}
    assert lost["models_not_read"] == 1000 - pages.MAX_MODELS == 744
    assert (text.count("queue.size"), text.endswith(", 248 more models")) == (8, True)


@contextmanager
def dripping(at_once, dripped):
    """The port of an engine that sends the rest of its answer a byte each 50 ms."""

    def serve():
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(at_once)
            for byte in dripped:
                if is_over.wait(0.05):
                    return
                try:
                    connection.sendall(bytes([byte]))
                except OSError:
                    return

    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        is_over.set()
        thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n"


@pytest.mark.parametrize(
    ("at_once", "dripped"),
    [(b"", HEAD + b"X-Filler: 1\r\n" * 30), (HEAD + b"\r\n", b"#" * 400)],
    ids=["head", "page"],
)
def test_an_engine_that_answers_byte_by_byte_has_three_seconds_for_all_of_it(
    monkeypatch, at_once, dripped
):
    monkeypatch.setattr(scrape, "_TIMEOUT_S", 0.5)
    told = []
    with (
        dripping(at_once, dripped) as port,
        EngineScraper(ScrapeSettings(), ManualClock(), told.append, pids=lambda: ()) as scraper,
    ):
        state, began_s = EngineState(VLLM, 1, port, ""), time.monotonic()
        scraper._read(state)
        assert time.monotonic() - began_s < 10
    assert state.last is ScrapeOutcome.UNREACHABLE
    assert "no whole answer within 0.5 s" in told[0]
