"""The table as Markdown."""

from benchmarks.jobs.score import LIVE, SLOWED, count_slowed

METHOD_HEAD = (
    "| method | right rank | right and nobody else | innocents named | of these disturbed | median delay (s) | healthy runs with an alarm |",
    "|---|---|---|---|---|---|---|",
)
FAULT_HEAD = (
    (
        "| fault | runs | steps | right rank | innocents | in turns | delay (s) | first cause right | wrong | unexplained |"
        " excess explained | cause after verdict (s) |"
    ),
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)
PAGES = {
    "reduced": ("Real jobs, measured", "make bench-jobs", "results.json"),
    "full": ("All real jobs, measured", "make bench-jobs FULL=1", "full.json"),
    "healthy": (
        "Real jobs in which nothing is wrong",
        "make bench-jobs HEALTHY=1",
        "healthy.json",
    ),
}
"""Title, command and figures of each set's page."""
HEALTHY_HEAD = (
    "| job | runs that ended well | watched (min) | collectives judged | runs in which Fleet named anybody |",
    "|---|---|---|---|---|",
)


def show(value):
    """A cell."""
    return "" if value is None else str(value)


def list_healthy(runs):
    """Lines of the table of runs in which nothing is wrong, by job and size."""
    lines = [*HEALTHY_HEAD]
    for job in dict.fromkeys((run["job"], *run["arguments"]) for run in runs):
        planned = [run for run in runs if (run["job"], *run["arguments"]) == job]
        over = [run for run in planned if "failed" not in run]
        minutes = sum(run["watched_s"] for run in over) / 60
        cells = [" ".join(job), f"{len(over)} of {len(planned)}", f"{minutes:.1f}"]
        cells += [
            sum(run["n_ops"] for run in over),
            sum(bool(run["said"][LIVE]) for run in over),
        ]
        lines.append(f"| {' | '.join(map(show, cells))} |")
    return lines


def build_tables(results):
    """Lines of both tables."""
    lines = [*METHOD_HEAD]
    for row in results["methods"]:
        cells = [row["method"], f"{row['right']} of {row['n_faulty']}", row["right_alone"]]
        cells += [row["innocents_named"], row["innocents_disturbed"], row["delay_s_median"]]
        cells += [f"{row['healthy_with_alarm']} of {row['n_healthy']}"]
        lines.append(f"| {' | '.join(map(show, cells))} |")
    lines += ["", *FAULT_HEAD]
    for row in results["faults"]:
        of = f" of {row['asked_why']}" if row["asked_why"] else ""
        ratio = row["step_ratio_median"]
        cells = [
            row["fault"],
            row["n"],
            None if ratio is None else f"×{ratio}",
            row["right"],
            row["innocents_named"],
            row["uneven"],
            row["delay_s_median"],
        ]
        cells += [
            f"{row['first_cause_right']}{of}" if of else "",
            row["first_cause_wrong"] if of else "",
        ]
        cells += [row["unexplained"] if of else "", row["share_explained_median"]]
        cells += [row["after_verdict_s_median"]]
        lines.append(f"| {' | '.join(map(show, cells))} |")
    n_slowed, n_right = count_slowed(results["runs"])
    if n_slowed:
        lines += [
            "",
            f"Of {n_slowed} runs whose median step took at least {SLOWED} times as long once the fault was there, the right rank was named in {n_right}.",
        ]
    return lines


def build_page(results):
    """The page beside the figures."""
    healthy = []
    if results["set"] == "healthy":
        healthy = [*list_healthy(results["runs"]), ""]
    beside = [f"{results['beside']}.", ""] if results["beside"] else []
    return [
        *build_head(results),
        *healthy,
        *beside,
        *build_tables(results),
        "",
        build_foot(results),
    ]


def build_head(results):
    """Title, and where it was measured."""
    runs = results["runs"]
    where = "; ".join(
        f"PyTorch {one['torch']} over Gloo on {one['cores']} cores ({one['system']})"
        for one in results["machines"]
    )
    title, command, figures = PAGES[results["set"]]
    loads = [run["load_before"] for run in runs if "load_before" in run]
    load = f"{min(loads):.1f} to {max(loads):.1f}" if loads else "unknown"
    planned = results["planned"]
    so_far = (
        f" of {planned}, in an order drawn once, so that they are a sample of all,"
        if len(runs) < planned
        else ""
    )
    revisions = sorted({run["revision"] for run in runs if "revision" in run})
    version = f" (version {', '.join(revisions)})" if revisions else ""
    return [
        f"# {title}",
        "",
        (
            f"`{command}`{version}, {results['date']}: {len(runs)} runs{so_far} of {where},"
            f" {results['took_s']:.0f} s. The machine's load before the runs was {load}: where it is above"
            " the number of cores other work took processor time from the jobs, and times are not those of a quiet machine. Settings, fixed before the"
            f" first run: `settings.json`; every run and figure: `{figures}`."
        ),
        "",
    ]


def build_foot(results):
    """What the columns mean."""
    return (
        "*Right rank*: the rank with the fault was named after the onset. *Innocents*: ranks that were named without a fault, or before theirs; *of these disturbed*: other work on"
        f" the machine kept them from running {results['disturbed_pct']:.0f} % of the time more than the median rank, so that they were slow. *Steps*: the median step once the fault was there, by what it"
        " was before: the median of the runs of which it is known. *In turns*: runs at whose end"
        " Fleet said that ranks are slow in turns (`imbalance:data`), which names nobody; with `imbalance` it is the answer. *ingero, live*:"
        " the verdict of Fleet in the run itself, with probes, pushes and agents; all other methods judge the recording of the run. `pause` and `kill` stop the job, which only"
        " live progress shows: no method can tell them from the records. Megatron's report always names somebody; it is no alarm. CUSUM and the MAD rules have the settings that they have for GPU jobs in `benchmarks/detect`, where steps differ by less. The first cause is"
        " asked of runs in which the rank was right and the fault has a cause that can be named."
    )
