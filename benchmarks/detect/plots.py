"""Pictures of the table, drawn without a display."""

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np


def draw_accuracy(rows, path):
    """Share of runs in which exactly the right workers were named: methods by data sets."""
    labelled = [
        r for r in rows if r.get("verdict_accuracy") is not None and "false_alarms_per_10k" in r
    ]
    methods = list(dict.fromkeys(r["method"] for r in labelled))
    datasets = list(dict.fromkeys(r["dataset"] for r in labelled))
    table = np.full((len(methods), len(datasets)), np.nan)
    for r in labelled:
        table[methods.index(r["method"]), datasets.index(r["dataset"])] = r["verdict_accuracy"]
    figure, axes = plt.subplots(figsize=(12, 4.6))
    axes.imshow(table, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    for (y, x), value in np.ndenumerate(table):
        if not np.isnan(value):
            axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=7)
    axes.set_xticks(range(len(datasets)), datasets, rotation=35, ha="right", fontsize=8)
    axes.set_yticks(range(len(methods)), methods, fontsize=8)
    axes.set_title("Share of runs answered right: the slow workers named and nobody else")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_delay(rows, path):
    """Steps from the onset to the naming, by the size of the slowdown."""
    figure, axes = plt.subplots(figsize=(7, 4))
    ours = [
        r
        for r in rows
        if r["dataset"].startswith("one ×")
        and "all" not in r["dataset"]
        and r.get("detect_steps_median")
    ]
    for method in dict.fromkeys(r["method"] for r in ours):
        here = [r for r in ours if r["method"] == method]
        sizes = [float(r["dataset"].removeprefix("one ×")) for r in here]
        axes.plot(sizes, [r["detect_steps_median"] for r in here], marker="o", label=method)
    axes.set(yscale="log", xlabel="slowdown of one worker", ylabel="median steps to its naming")
    axes.axhline(0.5, color="grey", linewidth=0.8, linestyle="--")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)
