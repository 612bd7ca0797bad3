"""The dashboard's first paint on a recording of 1 GB, by Chromium's own paint timing.

Three moments, from navigation: the browser's first contentful paint; when the page shows what the recording is; when it
shows the incidents of its newest part. The floor is the same page over a recording of 200 rows. Bar: 1 s.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import anyio
import numpy as np
from tests.recording.scenarios.faults import FAULTS

from ingero.config import Endpoint
from ingero.model.recording import AGGREGATE, SNAPSHOT, ProcessRank
from ingero.recording.queries.https_server import ListenSettings, open_server
from ingero.recording.scenarios.builder import START_NS
from ingero.recording.store.settings import WriterSettings
from ingero.recording.store.writer import RecordingWriter
from ingero.units import NS_PER_S

SAYS = "first paint of the dashboard on a recording of 1 GB"
GIB_ROWS = 8_900_000  # rows of one GB, at 121 bytes each with their indexes
CHROMIUM = "/usr/bin/chromium-headless-shell"
STACKS = {
    7: [("step", "train.py", 40), ("forward", "model.py", 12), ("linear", "layers.py", 99)],
    8: [("step", "train.py", 41), ("backward", "model.py", 30)],
    9: [("step", "train.py", 44), ("next_batch", "data.py", 7)],
}
RUNS = 5


def write_recording(path, n_events):
    """Four ranks with one late, and a job that reads its batches from the disk, over and over."""
    parts = [
        FAULTS["late_rank"]().events(),
        FAULTS["blocking_io"]().events(),
        FAULTS["memory_leak"]().events(),
    ]
    events = np.concatenate(parts)
    events["stack_hash"] = np.where(events["source"] == 1, 7 + np.arange(len(events)) % 3, 0)
    events = events[np.argsort(events["start_ns"], kind="stable")]
    period_ns = int((events["start_ns"] + events["duration_ns"]).max()) - START_NS
    settings = WriterSettings(queue_rows=n_events + len(events))
    with RecordingWriter(path, "node-0", settings) as writer:
        writer.put_ranks({6000 + rank: ProcessRank(rank, rank, 4) for rank in range(4)})
        n_periods = -(-n_events // len(events))
        for i in range(n_periods):
            batch = events.copy()
            batch["start_ns"] += i * period_ns
            batch["arg2"] = np.where(batch["source"] == 9, batch["arg2"] + 60 * i, batch["arg2"])
            batch["arg1"] = np.where(batch["op"] == 1, batch["arg1"] + (i << 32), batch["arg1"])
            writer.put_events(batch)
            if not i % 100:
                writer.flush()  # so that rows wait on the disk and not in memory
        names = {4821: "train", **{6000 + rank: f"rank{rank}" for rank in range(4)}}
        writer.put_process_names(names, START_NS)
        writer.put_stacks({key: _frames(frames) for key, frames in STACKS.items()})
        writer.put_snapshots(_snapshots(n_periods * period_ns))
        writer.put_aggregates(_aggregates(events, n_periods))


def _frames(frames):
    leaf_first = reversed(frames)
    return json.dumps([{"pfn": name, "pf": file, "pl": line} for name, file, line in leaf_first])


def _snapshots(length_ns):
    n = min(length_ns // NS_PER_S, 3600)
    rows = np.zeros(n, SNAPSHOT)
    rows["wall_ns"] = START_NS + length_ns - (n - np.arange(n)) * NS_PER_S
    rows["cpu_pct"] = 35 + 20 * np.sin(np.arange(n) / 40)
    rows["mem_pct"] = 60
    return rows


def _aggregates(events, n_periods):
    keys, counts = np.unique(
        np.stack((events["source"], events["op"], events["pid"]), axis=1),
        axis=0,
        return_counts=True,
    )
    rows = np.zeros(len(keys), AGGREGATE)
    rows["bucket_ns"] = START_NS // (60 * NS_PER_S) * 60 * NS_PER_S
    rows["source"], rows["op"], rows["pid"] = keys.T
    rows["count"] = counts * n_periods
    return rows


async def _paint(path, n_runs):
    """Median milliseconds of first contentful paint, of the summary and of the incidents."""
    from playwright.async_api import async_playwright

    moments = []
    settings = ListenSettings(Endpoint("127.0.0.1", 0), has_tls=False, has_mcp=False)
    async with async_playwright() as playwright:
        for _ in range(n_runs):  # each with a server and a browser that know nothing yet
            async with contextlib.AsyncExitStack() as stack:
                bound = await stack.enter_async_context(open_server(path, settings))
                browser = await playwright.chromium.launch(
                    executable_path=CHROMIUM, args=["--no-sandbox"]
                )
                stack.push_async_callback(browser.close)
                page = await browser.new_page()
                await page.goto(f"http://{bound}/")
                await page.wait_for_selector("#incidents[aria-busy=false]")
                moments.append(
                    await page.evaluate("""() => [
                    performance.getEntriesByName("first-contentful-paint")[0].startTime,
                    performance.getEntriesByName("summary-shown")[0].startTime,
                    performance.getEntriesByName("incidents-shown")[0].startTime]""")
                )
    return np.median(moments, axis=0)


def run(path=None):
    if not Path(CHROMIUM).exists():
        yield f"not measured: needs {CHROMIUM} (apt-get install chromium-headless-shell)"
        return
    with tempfile.TemporaryDirectory(prefix="ingero-bench-") as folder:
        small, large = Path(folder) / "small.db", Path(path or Path(folder) / "large.db")
        write_recording(small, 200)
        if not large.exists():
            write_recording(large, GIB_ROWS)
        floor = anyio.run(_paint, small, RUNS)
        found = anyio.run(_paint, large, RUNS)
    yield f"{'moment (median of ' + str(RUNS) + ')':<34} {'200 rows':>10} {'1 GB':>10}  ratio"
    for name, before, after in zip(
        ("first contentful paint", "what the recording is", "incidents of its newest part"),
        floor, found, strict=True,
    ):  # fmt: skip
        yield f"{name:<34} {before:>7.0f} ms {after:>7.0f} ms {after / before:>6.1f}"


if __name__ == "__main__":
    write_recording(Path(sys.argv[1]), int(sys.argv[2]))
