"""The table on a terminal, in Markdown and as pictures."""

import html

from benchmarks.detect import calibrated, cost

COLUMNS = (
    ("method", "method"),
    ("precision", "precision"),
    ("recall", "recall"),
    ("false_alarms_per_10k", "false per 10 000 worker-steps"),
    ("detect_ops_median", "ops"),
    ("detect_steps_median", "steps"),
    ("detect_steps_max", "worst"),
    ("detected_in_3_steps", "in 3"),
    ("other_drags_per_10k", "other drags"),
    ("verdict_accuracy", "runs right"),
    ("n_runs", "runs"),
)


def cell(row, key):
    value = row.get(key)
    if value is None:
        return "–"
    interval = row.get(f"{key}_ci")
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return f"{text} ({interval[0]:.2f}–{interval[1]:.2f})" if interval else text


def tables(rows):
    """Markdown, one table per data set of labelled runs, then what else was measured."""
    labelled = [row for row in rows if "false_alarms_per_10k" in row and "tier" not in row]
    for dataset in dict.fromkeys(row["dataset"] for row in labelled):
        yield f"\n### {dataset}\n"
        yield "| " + " | ".join(title for _, title in COLUMNS) + " |"
        yield "|" + "---|" * len(COLUMNS)
        for row in labelled:
            if row["dataset"] == dataset:
                yield "| " + " | ".join(cell(row, key) for key, _ in COLUMNS) + " |"
    yield "\n### Step times of 881 real jobs, nobody known to be slow\n"
    yield "| method | alarms per 1 000 steps |\n|---|---|"
    for row in rows:
        if row["dataset"] == "step_times":
            yield f"| {row['method']} | {row['alarms_per_1000_steps']:.3f} |"
    yield "\n### Simulated healthy peers: false alarms over the budget (1 is the budget)\n"
    yield "| noise | alarm tier (10 %) | notice tier (3 %) | worker-operations |\n|---|---|---|---|"
    simulated = [row for row in rows if "tier" in row]
    for alarm, notice in zip(simulated[::2], simulated[1::2], strict=True):
        name = alarm["dataset"].removeprefix("simulated: ")
        yield (
            f"| {name} | {alarm['times_budget']:.2f} | {notice['times_budget']:.2f} |"
            f" {alarm['n_worker_ops']:,} |"
        )
    yield from more_tables(rows)


def more_tables(rows):
    """Markdown: recovery, drift over hours, hangs and cost."""
    yield "\n### Recovery: from the first ordinary step to the end of the report\n"
    yield "| slow for four steps | the alarm is over, steps: median (worst) | any report is over | named, of runs |\n|---|---|---|---|"
    recovery = [row for row in rows if "report" in row]
    for alarm, notice in zip(recovery[::2], recovery[1::2], strict=True):
        over = [
            f"{row['clear_steps_median']} ({row['clear_steps_max']})" if row["n_named"] else "–"
            for row in (alarm, notice)
        ]
        name = alarm["dataset"].removeprefix("recovery from ")
        yield (
            f"| {name} | {over[0]} | {over[1]} | {alarm['n_named']} alarmed, {notice['n_named']} reported,"
            f" of {alarm['n_runs']} |"
        )
    yield "\n### Drift over hours\n"
    for row in rows:
        if "hours" in row and "bar" not in row:
            yield (
                f"- {row['dataset']}, {row['hours']} h: {row['n_alarms']} workers alarmed, {row['n_notices']} reported;"
                f" verdicts given: {', '.join(row['verdicts'])}"
            )
        elif "hours" in row:
            yield (
                f"- {row['dataset']}, {row['hours']} h: noticed in {row['n_noticed']} of {row['n_runs']} runs, when it was"
                f" {row['noticed_at_median']}× its healthy self in the median, {row['noticed_at_max']}× at most (the bar is"
                f" {row['bar']:.2f}×); {row['n_alarms']} alarms, {row['n_others']} others reported"
            )
    yield "\n### A notice tier raised to the peers' own lasting spread (`notice_spread`; off by default)\n"
    yield from calibrated.describe([row for row in rows if "notice_spread" in row])
    yield "\n### Hangs\n"
    for row in rows:
        if row["method"] == "hang attributor":
            yield f"- {row['dataset']}: named {row['named']}, injected {row['truth']}"
    yield "\n### Cost\n"
    for row in rows:
        if row["method"] == "cost":
            yield from cost.describe(row)


HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Detection benchmark</title>
<style>body{font:14px system-ui;margin:2rem;max-width:70rem}td,th{padding:.15rem .6rem;text-align:right}
td:first-child,th:first-child{text-align:left}table{border-collapse:collapse;margin:0 0 2rem}
tr+tr{border-top:1px solid #ddd}.bar{fill:#2a6fbb}.pale{fill:#c9d7e6}text{font:12px system-ui}</style>
<h1>Detection benchmark</h1><p>Repeat it with <code>make bench-detect</code>. Bars: share of runs in which exactly the right
workers were named and nobody else (for an imbalance: nobody alarmed, and the imbalance told).</p>"""


def page(rows):
    """One HTML page: for each data set a bar per method."""
    parts = [HEAD]
    labelled = [
        row for row in rows if row.get("verdict_accuracy") is not None and "tier" not in row
    ]
    labelled = [row for row in labelled if row["method"] != "hang attributor"]
    for dataset in dict.fromkeys(row["dataset"] for row in labelled):
        here = [row for row in labelled if row["dataset"] == dataset]
        parts.append(f"<h2>{html.escape(dataset)}</h2>")
        parts.append(f'<svg width="760" height="{22 * len(here)}" role="img">')
        for at, row in enumerate(here):
            y, width = 22 * at, 380 * row["verdict_accuracy"]
            low, high = row.get("verdict_accuracy_ci") or (0, 0)
            parts.append(
                f'<text x="0" y="{y + 14}">{html.escape(row["method"])}</text>'
                f'<rect class="pale" x="230" y="{y + 3}" width="380" height="14"/>'
                f'<rect class="bar" x="230" y="{y + 3}" width="{width:.0f}" height="14"/>'
                f'<line x1="{230 + 380 * low:.0f}" x2="{230 + 380 * high:.0f}" y1="{y + 10}" y2="{y + 10}" stroke="#111"/>'
                f'<text x="620" y="{y + 14}">{row["verdict_accuracy"]:.2f} of {row["n_runs"]}</text>'
            )
        parts.append("</svg>")
    return "\n".join(parts) + "</html>\n"
