"""What is read from the pages of serving engines."""

import time

import pytest
from tests.agent.inference.engine_pages import (
    MODEL,
    PAGE_OF_TGI,
    PAGE_OF_TRITON,
    page_of_sglang,
    page_of_vllm,
)

from ingero.agent.inference.engines import SGLANG, TGI, TRITON, VLLM
from ingero.agent.inference.pages import read_page
from ingero.agent.metrics.series import Distribution
from ingero.errors import BadDataError

TTFT = "vllm:time_to_first_token_seconds"


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
