"""Serving engines: how they are recognised, where their metrics are, and what those mean in OpenTelemetry's words.

Sources, the projects' own pages: vLLM docs/usage/metrics.md and vllm/v1/metrics; SGLang
docs/references/production_metrics.md; TGI docs/source/reference/metrics.md and launcher.md; Triton
docs/user_guide/metrics.md. Names are OpenTelemetry's conventions for generative AI where it has one, and like them
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from ingero.agent.metrics.series import Kind


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """One metric of an engine and what it is called here.

    Attributes:
        theirs: A histogram's name, or that of a sample.
        name: For OTLP.
        kind: What its numbers are.
        unit: UCUM.
        description: For people.
        scale: What their numbers are multiplied by.
        only: A label and its value: other samples are left out. None takes all.
    """

    theirs: str
    name: str
    kind: Kind
    unit: str
    description: str
    scale: float = 1.0
    only: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """One kind of engine.

    Attributes:
        name: ``gen_ai.system``.
        port: Where its metrics are unless its command line says otherwise.
        port_options: Options that say so.
        model_options: Options that name the model, for engines whose metrics do not.
        metrics: What is taken of a page; of several of one name the first that the page has.
        port_variable: Of its environment, which has the port where no option says it; empty for none.
    """

    name: str
    port: int
    port_options: tuple[str, ...]
    model_options: tuple[str, ...]
    metrics: tuple[EngineMetric, ...]
    port_variable: str = ""


def _histogram(
    theirs: str, name: str, description: str, only: tuple[str, str] | None = None
) -> EngineMetric:
    return EngineMetric(theirs, f"gen_ai.{name}", Kind.HISTOGRAM, "s", description, only=only)


def _sum(
    theirs: str, name: str, description: str, unit: str = "1", scale: float = 1.0
) -> EngineMetric:
    return EngineMetric(theirs, f"gen_ai.{name}", Kind.SUM, unit, description, scale)


def _gauge(theirs: str, name: str, description: str) -> EngineMetric:
    return EngineMetric(theirs, f"gen_ai.{name}", Kind.GAUGE, "1", description)


_FIRST: Final = ("server.time_to_first_token", "Time from a request to its first token.")
_TOKEN: Final = ("server.time_per_output_token", "Time between two tokens of a request.")
_REQUEST: Final = ("server.request.duration", "Time from a request to the end of its answer.")
_QUEUED: Final = ("server.queue.duration", "Time that a request waited before it was worked on.")
_PREFILL: Final = ("server.request.duration.prefill", "Time in which prompts were worked on.")
_DECODE: Final = ("server.request.duration.decode", "Time in which tokens were made.")
_INPUT: Final = ("token.usage.input", "Tokens of prompts.")
_OUTPUT: Final = ("token.usage.output", "Tokens that were made.")
_RUNNING: Final = ("server.batch.size", "Requests that are worked on.")
_WAITING: Final = ("server.queue.size", "Requests that wait.")
_CACHE: Final = ("server.kv_cache.utilization", "Share of the KV cache that is in use.")
_DONE: Final = ("server.request.success", "Requests that were answered.")
_FAILED: Final = ("server.request.failure", "Requests that were not.")
_SPENT: Final = (
    "server.request.time",
    "Time from requests to the ends of their answers, all together.",
)
_WAITED: Final = ("server.queue.time", "Time that requests waited, all together.")
_COMPUTED: Final = ("server.compute.time", "Time in which models ran, all together.")
_MICRO: Final = 1e-6

VLLM: Final = ServingEngine(
    "vllm", 8000, ("--port",), ("--model", "--served-model-name"),
    (
        _histogram("vllm:time_to_first_token_seconds", *_FIRST),
        _histogram("vllm:inter_token_latency_seconds", *_TOKEN),
        _histogram("vllm:time_per_output_token_seconds", *_TOKEN),  # before 0.11
        _histogram("vllm:e2e_request_latency_seconds", *_REQUEST),
        _histogram("vllm:request_queue_time_seconds", *_QUEUED),
        _histogram("vllm:request_prefill_time_seconds", *_PREFILL),
        _histogram("vllm:request_decode_time_seconds", *_DECODE),
        _sum("vllm:prompt_tokens_total", *_INPUT),
        _sum("vllm:generation_tokens_total", *_OUTPUT),
        _sum("vllm:request_success_total", *_DONE),
        _gauge("vllm:num_requests_running", *_RUNNING),
        _gauge("vllm:num_requests_waiting", *_WAITING),
        _gauge("vllm:kv_cache_usage_perc", *_CACHE),
        _gauge("vllm:gpu_cache_usage_perc", *_CACHE),  # before 0.10
    ),
)  # fmt: skip
SGLANG: Final = ServingEngine(
    "sglang", 30_000, ("--port",), ("--model-path", "--model"),
    (
        _histogram("sglang:time_to_first_token_seconds", *_FIRST),
        _histogram("sglang:inter_token_latency_seconds", *_TOKEN),
        _histogram("sglang:time_per_output_token_seconds", *_TOKEN),  # before 0.5
        _histogram("sglang:e2e_request_latency_seconds", *_REQUEST),
        _histogram("sglang:queue_time_seconds", *_QUEUED),
        _sum("sglang:prompt_tokens_total", *_INPUT),
        _sum("sglang:generation_tokens_total", *_OUTPUT),
        _sum("sglang:num_requests_total", *_DONE),
        _gauge("sglang:num_running_reqs", *_RUNNING),
        _gauge("sglang:num_queue_reqs", *_WAITING),
        _gauge("sglang:token_usage", *_CACHE),
    ),
)  # fmt: skip
TGI: Final = ServingEngine(
    "tgi", 3000, ("--prometheus-port", "--port", "-p"), ("--model-id",),
    (
        _histogram("tgi_request_mean_time_per_token_duration", *_TOKEN),
        _histogram("tgi_request_duration", *_REQUEST),
        _histogram("tgi_request_queue_duration", *_QUEUED),
        _histogram("tgi_batch_forward_duration", *_PREFILL, only=("method", "prefill")),
        _histogram("tgi_batch_forward_duration", *_DECODE, only=("method", "decode")),
        _sum("tgi_request_input_length_sum", *_INPUT),
        _sum("tgi_request_generated_tokens_sum", *_OUTPUT),
        _sum("tgi_request_success", *_DONE),
        _sum("tgi_request_failure", *_FAILED),
        _gauge("tgi_batch_current_size", *_RUNNING),
        _gauge("tgi_queue_size", *_WAITING),
    ),
    port_variable="PORT",
)  # fmt: skip
TRITON: Final = ServingEngine(
    "triton", 8002, ("--metrics-port",), (),
    (
        _sum("nv_inference_request_duration_us", *_SPENT, "s", _MICRO),
        _sum("nv_inference_queue_duration_us", *_WAITED, "s", _MICRO),
        _sum("nv_inference_compute_infer_duration_us", *_COMPUTED, "s", _MICRO),
        _sum("nv_inference_request_success", *_DONE),
        _sum("nv_inference_request_failure", *_FAILED),
        _gauge("nv_inference_pending_request_count", *_WAITING),
    ),
)  # fmt: skip


def find_engine(arguments: Sequence[str]) -> ServingEngine | None:
    """Which engine a command line starts; None for none."""
    if not arguments:
        return None
    names = [PurePath(text).name for text in arguments[:3]]
    modules = [
        text for text in arguments if text.startswith(("vllm.entrypoints", "sglang.launch_server"))
    ]
    if any(text.startswith("vllm.entrypoints") for text in modules) or (
        "vllm" in names and "serve" in arguments
    ):
        return VLLM
    if modules or ("sglang" in names and "serve" in arguments):
        return SGLANG
    if "text-generation-launcher" in names:
        return TGI
    return TRITON if "tritonserver" in names else None


def find_option(arguments: Sequence[str], names: Sequence[str]) -> str:
    """The value of the first of these options that is given, as ``--port 1`` or ``--port=1``; empty for none."""
    for name in names:
        for at, text in enumerate(arguments):
            if text == name and at + 1 < len(arguments):
                return arguments[at + 1]
            if text.startswith(f"{name}="):
                return text[len(name) + 1 :]
    return ""
