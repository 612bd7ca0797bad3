"""The devices' series in the words of OpenTelemetry's conventions for hardware, on a page and in a push."""

from prometheus_client.parser import text_string_to_metric_families

from ingero.agent.capture.gpu.readings import GpuReading
from ingero.agent.metrics.exporting import PrometheusPage, build_export
from ingero.agent.metrics.hardware import iter_hardware_series

GIB = 1 << 30
FULL = GpuReading(
    0, "GPU-a", "NVIDIA H100", memory_used=20 * GIB, memory_total=80 * GIB, gpu_pct=75,
    temperature_c=61, power_mw=350_500, ecc_corrected=3, ecc_uncorrected=0,
)  # fmt: skip
SILENT = GpuReading(1, "GPU-b", "NVIDIA H100")
DEVICE = {
    "hw.id": "GPU-a", "hw.name": "GPU 0", "hw.model": "NVIDIA H100", "hw.vendor": "NVIDIA",
}  # fmt: skip


def test_a_device_is_told_by_the_conventions_names_units_and_kinds():
    export = build_export(iter_hardware_series([FULL, SILENT]), {}, 1, 2)
    (resource,) = export.tree.resource_metrics
    told = {}
    for metric in resource.scope_metrics[0].metrics:
        numbers = (metric.gauge or metric.sum).data_points
        kind = "gauge" if metric.gauge else "counter" if metric.sum.is_monotonic else "updown"
        for point in numbers:
            labels = {item.key: item.value.string_value for item in point.attributes}
            value = point.as_double if point.as_double is not None else point.as_int
            told[metric.name, labels.get("error.type", "")] = kind, metric.unit, value, labels
    typed = {**DEVICE, "hw.type": "gpu"}
    assert told == {
        ("hw.gpu.memory.limit", ""): ("updown", "By", 80 * GIB, DEVICE),
        ("hw.gpu.memory.usage", ""): ("updown", "By", 20 * GIB, DEVICE),
        ("hw.gpu.memory.utilization", ""): ("gauge", "1", 0.25, DEVICE),
        ("hw.gpu.utilization", ""): ("gauge", "1", 0.75, {**DEVICE, "hw.gpu.task": "general"}),
        ("hw.power", ""): ("gauge", "W", 350.5, typed),
        ("hw.errors", "corrected"): (
            "counter", "{error}", 3, {**typed, "error.type": "corrected"},
        ),
        ("hw.errors", "uncorrected"): (
            "counter", "{error}", 0, {**typed, "error.type": "uncorrected"},
        ),
        ("hw.temperature", ""): (
            "gauge", "Cel", 61,
            {"hw.id": "GPU-a/die", "hw.name": "GPU 0 die", "hw.parent": "GPU-a",
             "hw.sensor_location": "GPU_DIE"},
        ),
    }  # fmt: skip


def test_errors_count_since_a_time_that_nobody_knows_and_memory_since_tracing_began():
    export = build_export(iter_hardware_series([FULL]), {}, 1, 2)
    (resource,) = export.tree.resource_metrics
    starts = {
        metric.name: {point.start_time_unix_nano for point in metric.sum.data_points}
        for metric in resource.scope_metrics[0].metrics
        if metric.sum
    }
    assert starts == {
        "hw.errors": {0},
        "hw.gpu.memory.limit": {1},
        "hw.gpu.memory.usage": {1},
    }


def test_prometheus_sees_the_same_by_the_names_that_opentelemetry_maps_them_to():
    page = PrometheusPage()
    page.take(tuple(iter_hardware_series([FULL])), 2)
    samples = {
        sample.name: sample
        for family in text_string_to_metric_families(page.render())
        for sample in family.samples
    }
    assert set(samples) == {
        "hw_gpu_memory_limit_bytes", "hw_gpu_memory_usage_bytes", "hw_gpu_memory_utilization_ratio",
        "hw_gpu_utilization_ratio", "hw_power_watts", "hw_errors_total", "hw_temperature_celsius",
    }  # fmt: skip
    assert samples["hw_gpu_utilization_ratio"].labels["hw_id"] == "GPU-a"
    assert samples["hw_gpu_utilization_ratio"].value == 0.75
