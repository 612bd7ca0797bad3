"""The metrics of serving engines, read over HTTP: each engine that is found, and what becomes of failures."""

import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.agent.inference.engine_pages import (
    MODEL,
    PAGE_OF_TGI,
    PAGE_OF_TRITON,
    page_of_vllm,
    write_process,
)

from ingero.agent.inference import pages, scrape
from ingero.agent.inference.engines import VLLM
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
from ingero.cli.commands.trace.inference import describe_engine
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S


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
