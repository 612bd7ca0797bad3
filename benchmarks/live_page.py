"""Fleet's live page with 10 000 ranks: frames of a Chromium that shows it, beside those of an empty page.

Chromium's own trace says what the page's thread did in each frame that came late: a frame is the page's fault when that
thread worked through it, and the machine's when the thread waited, or had work and got no processor.
"""

import itertools
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import numpy as np
from tests.e2e.agents import health
from tests.support.browser import find_chromium, open_browser

from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.testing.waiting import wait_until

SAYS = "the live page: the longest frame while 10 000 ranks are drawn twice a second"
N_RANKS = 10_000
N_COLUMNS = 600
WATCH_MS = 20_000
PUSH_S = 5.0
NODES_PER_PUSH = 500
FRAMES = """
window.frames_ms = []; window.tasks_ms = [];
let before;
const next = (now) => { if (before !== undefined) window.frames_ms.push(now - before); before = now; requestAnimationFrame(next); };
requestAnimationFrame(next);
new PerformanceObserver((list) => window.tasks_ms.push(...list.getEntries().map((one) => one.duration))).observe({ type: "longtask" });
"""


def build_pushes(rng):
    """Scores of every node, in a few requests."""
    template = health("NODE", 0.5, cluster="big")["resourceMetrics"][0]
    metrics = template["scopeMetrics"][0]["metrics"]
    template["scopeMetrics"][0]["metrics"] = [
        metric for metric in metrics if metric["name"] == "ingero.node.health_score"
    ]
    text = json.dumps(template)
    scores = rng.normal(0.9, 0.02, N_RANKS).clip(0, 1)
    scores[rng.integers(0, N_RANKS, 50)] = 0.3
    for first in range(0, N_RANKS, NODES_PER_PUSH):
        parts = [
            text.replace("NODE", f"node{node}").replace("0.5", f"{scores[node]:.4f}")
            for node in range(first, first + NODES_PER_PUSH)
        ]
        yield '{"resourceMetrics":[' + ",".join(parts) + "]}"


def push_for_ever(url, is_over):
    rng = np.random.default_rng(7)
    with httpx.Client(timeout=60) as client:
        while not is_over.is_set():
            for body in build_pushes(rng):
                answer = client.post(
                    url, content=body, headers={"content-type": "application/json"}
                )
                answer.raise_for_status()
            is_over.wait(PUSH_S)


@dataclass(frozen=True)
class Trace:
    """What the page's thread did.

    Attributes:
        longest_ms: Its longest task by the clock.
        longest_cpu_ms: Its longest task by processor time.
        late: Of each frame over 50 ms: how long it took, how long a task ran meanwhile, and how much of that it had a
            processor, in ms.
    """

    longest_ms: float
    longest_cpu_ms: float
    late: tuple[tuple[float, float, float], ...]


def read_trace(raw):
    """From Chromium's trace events, whose times are microseconds."""
    events = json.loads(raw)["traceEvents"]
    frames = [one for one in events if one["name"] == "FireAnimationFrame"]
    threads = Counter((one["pid"], one["tid"]) for one in frames)
    ((page, _),) = threads.most_common(1)
    mine = [one for one in events if (one.get("pid"), one.get("tid")) == page]
    tasks = [one for one in mine if one["name"] == "RunTask" and one["ph"] == "X"]
    starts = sorted(one["ts"] for one in frames if (one["pid"], one["tid"]) == page)
    late = []
    for begin, end in itertools.pairwise(starts):
        if end - begin <= 50_000:
            continue
        inside = [
            (min(one["ts"] + one["dur"], end) - max(one["ts"], begin), one)
            for one in tasks
            if one["ts"] < end and one["ts"] + one["dur"] > begin
        ]
        busy = sum(shared for shared, _ in inside)
        cpu = sum(one["tdur"] * shared / max(one["dur"], 1) for shared, one in inside)
        late.append(((end - begin) / 1000, busy / 1000, cpu / 1000))
    return Trace(
        max(one["dur"] for one in tasks) / 1000,
        max(one["tdur"] for one in tasks) / 1000,
        tuple(late),
    )


def watch(browser, url, ready=None):
    """Frame times and long tasks, in ms, of a page while nothing is done with it; updates; and what the trace says."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.goto(url)
    if ready:
        page.wait_for_selector(ready, timeout=60_000)
    categories = ["devtools.timeline", "disabled-by-default-devtools.timeline"]
    browser.start_tracing(page=page, categories=categories)
    page.evaluate(FRAMES)
    page.wait_for_timeout(WATCH_MS)
    found = page.evaluate(
        "[window.frames_ms, window.tasks_ms, performance.getEntriesByName('levels-shown').length]"
    )
    trace = read_trace(browser.stop_tracing())
    page.close()
    return np.array(found[0]), np.array(found[1]), found[2], trace


def describe(name, found):
    frames, tasks, n_updates, trace = found
    slow = int((frames > 50).sum())
    longest = f"{tasks.max():.0f} ms" if tasks.size else "none over 50 ms"
    return (
        f"{name:<34} {len(frames):>5} {np.percentile(frames, 99):>8.1f} {frames.max():>8.1f} {slow:>9}"
        f"   {longest:<16} {n_updates:<7} {trace.longest_ms:>5.0f} / {trace.longest_cpu_ms:<5.0f}"
        + ", ".join(f"{took:.0f} ({busy:.0f}, {cpu:.0f})" for took, busy, cpu in trace.late)
    )


def run():
    if find_chromium() is None:
        yield "not measured: needs chromium-headless-shell"
        return
    yield f"{'page, ' + str(WATCH_MS // 1000) + ' s':<34} frames  p99 (ms)  longest  over 50 ms  longest task  updates"
    yield "then by the trace: longest task by clock / by processor, and of each late frame (time in tasks, with a processor)"
    for interval, description in (
        ("5s", "a column each 5 s"),
        ("100ms", "600 columns, all redrawn"),
    ):
        config = build_fleet_config({"max_expected_nodes": 2 * N_RANKS})
        config["extensions"]["ingero_threshold"]["live_interval"] = interval
        config["receivers"]["otlp"]["protocols"]["http"]["max_request_body_size"] = "8MiB"
        with run_fleet(config) as fleet, open_browser() as browser:
            is_over = threading.Event()
            url = fleet.url("receivers.otlp http", "/v1/metrics")
            pushing = threading.Thread(target=push_for_ever, args=(url, is_over))
            pushing.start()
            admin = fleet.url("extensions.ingero_threshold admin", "")
            try:
                wait_until(partial(has_all, admin), 120)
                if interval == "100ms":
                    time.sleep(N_COLUMNS * 0.1 + 5)
                yield describe("an empty page beside the same Fleet", watch(browser, "about:blank"))
                link = f"{admin}/live#cluster=big&measure=score"
                yield describe(
                    f"10 000 ranks, {description}", watch(browser, link, "#rows:not(:empty)")
                )
            finally:
                is_over.set()
                pushing.join()


def has_all(admin):
    clusters = httpx.get(f"{admin}/api/v1/admin/clusters").json()["clusters"]
    return bool(clusters) and clusters[0]["known_nodes"] == N_RANKS


if __name__ == "__main__":
    print(Path(__file__).name, *run(), sep="\n")
