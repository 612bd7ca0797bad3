"""Which series our programs have: those on a page, and those that the generated reference declares."""

import json
import re

from tests.deploy.site import DEPLOY, ROOT

KEYWORDS = {
    "abs", "absent", "and", "avg", "avg_over_time", "bool", "bottomk", "by", "ceil", "clamp_max", "clamp_min", "count",
    "delta", "group", "group_left", "group_right", "histogram_quantile", "ignoring", "increase", "irate", "label_replace",
    "max", "max_over_time", "min", "min_over_time", "offset", "on", "or", "quantile", "rate", "round", "scalar",
    "sort", "sort_desc", "sum", "time", "topk", "unless", "vector", "without",
}  # fmt: skip
OF_A_TRACE = re.compile(
    r"gpu_|nccl_collective_(bytes|count|duration)|system_|ingero_(incidents|trace|ringbuf|nccl|cuda)_"
)
"""Series of `ingero trace`, which needs root: `test_trace_series` looks for them."""
SUFFIXES = re.compile(r"_(bucket|sum|count)$")


def find_names(expression):
    """Series that an expression asks for."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'', '""', expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    words = set(re.findall(r"(?<![\w:$.])[a-zA-Z_:][\w:]*", bare))
    return words - KEYWORDS


def declared_names():
    """Series of Fleet and Echo that appear with the first event that they count, as the reference declares them."""
    pages = (ROOT / "docs/reference" / name for name in ("fleet-metrics.md", "echo-metrics.md"))
    return {
        name
        for page in pages
        for name in re.findall(r"^\| `(\w+)` \|", page.read_text(), re.MULTILINE)
    }


def is_known(name, names):
    """Whether a series is there by this name, or is part of a histogram that is."""
    return name in names or SUFFIXES.sub("", name) in names


def read_dashboard(name):
    return json.loads((DEPLOY / "grafana" / f"{name}.json").read_text())


def iter_queries(name):
    """Every query of a dashboard's panels, for all clusters and instances."""
    for panel in read_dashboard(name)["panels"]:
        for target in panel.get("targets", ()):
            yield re.sub(r"\$(cluster|instance)\b", ".*", target["expr"])
