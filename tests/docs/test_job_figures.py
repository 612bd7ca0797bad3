"""The README's rows about real jobs say what the committed results say."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "results.json", "full.md": "full.json", "healthy.md": "healthy.json"}
MIN_RATIO = 1.3


def list_phrases(results):
    """What a row about these results has to say, each somewhere."""
    summary, runs, faults = results["methods"][0], results["runs"], results["faults"]
    n_healthy = summary["n_healthy"]
    n_quiet = n_healthy - summary["healthy_with_alarm"]
    if not summary["n_faulty"]:
        return [f"{len(runs)} runs", f"nobody named in {n_quiet} of {n_healthy}"]
    asked, right, wrong = (
        sum(one[name] for one in faults)
        for name in ("asked_why", "first_cause_right", "first_cause_wrong")
    )
    slower = [
        run for run in runs if run["rank"] is not None and (run.get("step_ratio") or 0) >= MIN_RATIO
    ]
    n_right = sum(run["scores"][summary["method"]]["right"] for run in slower)
    return [
        f"{len(runs)} runs",
        f"the right rank in {summary['right']} of {summary['n_faulty']}",
        f"after {summary['delay_s_median']:.1f} s (median)",
        f"first cause right in {right} of {asked} answers, wrong in {wrong}",
        f"nobody named in {n_quiet} of {n_healthy} without a fault",
        f"runs in which a rank without a fault was named: {summary['innocents_named']}",
        f"of {len(slower)} whose steps are known to have taken 1.3 times as long or more, in {n_right}",
    ]


@pytest.mark.parametrize("page", PAGES)
def test_a_row_about_real_jobs_says_what_its_results_say(page):
    results = json.loads((ROOT / "benchmarks/jobs" / PAGES[page]).read_text())
    rows = (ROOT / "README.md").read_text().splitlines()
    (row,) = [row for row in rows if row.rstrip(" |").endswith(f"(benchmarks/jobs/{page})")]
    assert [phrase for phrase in list_phrases(results) if phrase.lower() not in row.lower()] == []
