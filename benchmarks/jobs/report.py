"""The table as Markdown."""

METHOD_HEAD = (
    "| method | right rank | right and nobody else | innocents named | of these disturbed | median delay (s) | healthy runs with an alarm |",
    "|---|---|---|---|---|---|---|",
)
FAULT_HEAD = (
    (
        "| fault | runs | right rank | innocents | delay (s) | first cause right | wrong | unexplained |"
        " excess explained | cause after verdict (s) |"
    ),
    "|---|---|---|---|---|---|---|---|---|---|",
)


def show(value):
    """A cell."""
    return "" if value is None else str(value)


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
        cells = [
            row["fault"],
            row["n"],
            row["right"],
            row["innocents_named"],
            row["delay_s_median"],
        ]
        cells += [
            f"{row['first_cause_right']}{of}" if of else "",
            row["first_cause_wrong"] if of else "",
        ]
        cells += [row["unexplained"] if of else "", row["share_explained_median"]]
        cells += [row["after_verdict_s_median"]]
        lines.append(f"| {' | '.join(map(show, cells))} |")
    return lines


def build_page(results):
    """The page beside the figures."""
    where = results["machine"]
    loads = [run["load_before"] for run in results["runs"] if "load_before" in run]
    load = f"{min(loads):.1f} to {max(loads):.1f}" if loads else "unknown"
    return [
        "# Real jobs, measured",
        "",
        (
            f"`make bench-jobs`, {results['date']}: {len(results['runs'])} runs of PyTorch {where['torch']} over Gloo on"
            f" {where['cores']} cores ({where['system']}), {results['took_s']:.0f} s. The machine's load before the runs was {load}: where it is above"
            " the number of cores other work took processor time from the jobs, and times are not those of a quiet machine. Settings, fixed before the"
            " first run: `settings.json`; every run and figure: `results.json`."
        ),
        "",
        *build_tables(results),
        "",
        (
            "*Right rank*: the rank with the fault was named after the onset. *Innocents*: ranks that were named without a fault, or before theirs; *of these disturbed*: other work on"
            f" the machine kept them from running {results['disturbed_pct']:.0f} % of the time more than the median rank, so that they were slow. *ingero, live*:"
            " the verdict of Fleet in the run itself, with probes, pushes and agents; all other methods judge the recording of the run. `pause` and `kill` stop the job, which only"
            " live progress shows: no method can tell them from the records. Megatron's report always names somebody; it is no alarm. CUSUM and the MAD rules have the settings that they have for GPU jobs in `benchmarks/detect`, where steps differ by less. The first cause is"
            " asked of runs in which the rank was right and the fault has a cause that can be named."
        ),
    ]
