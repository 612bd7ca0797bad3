"""Pages of serving engines as the engines publish them, and their processes below a made-up ``/proc``.

No engine runs here. vLLM and SGLang make their pages with ``prometheus_client``, so theirs are made with it, with the
names, labels and buckets of the projects' sources; TGI's (Rust) and Triton's (C++) are written out in the form of those
libraries. Numbers are ours. Sources: vllm/v1/metrics/loggers.py and docs/usage/metrics.md (vllm-project/vllm);
docs/references/production_metrics.md (sgl-project/sglang); docs/source/reference/metrics.md
(huggingface/text-generation-inference); docs/user_guide/metrics.md (triton-inference-server/server).
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

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


def write_process(proc, pid, line, *, start_ticks=0):
    folder = proc / str(pid)
    folder.mkdir(exist_ok=True)
    (folder / "cmdline").write_bytes("\0".join(line.split()).encode() + b"\0")
    if start_ticks:
        (folder / "stat").write_text(f"{pid} (a (b) c) S {'0 ' * 18}{start_ticks} 0\n")
