"""Which runs there are: a job, a fault, a size and a seed each."""

import random
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "jobs"
NOBODYS = ("none", "imbalance", "first-use")
"""Kinds of fault of which nobody may be named: a rank that is slow once, or all in turns, is no slow rank."""


@dataclass(frozen=True)
class Run:
    """One run of a job.

    Attributes:
        job: Name of the script in ``examples/jobs``.
        fault: As `ingero up --fault` takes it; ``none`` for none.
        arguments: Of the script.
        seed: Which of several alike.
        watch_s: For how long it is watched.
    """

    job: str
    fault: str
    arguments: tuple = ()
    seed: int = 0
    watch_s: int = 30

    @property
    def kind(self):
        """The fault without its rank and amount."""
        return self.fault.partition(":")[0]

    @property
    def rank(self):
        """Who must be named; None for nobody."""
        return None if self.kind in NOBODYS else int(self.fault.split(":")[1])

    @property
    def name(self):
        """Of its files."""
        fault = self.fault.replace(":", "-").replace("%", "pct").replace("/", "p")
        size = "-".join(argument.lstrip("-") for argument in self.arguments)
        return ".".join(filter(None, (self.job, fault, size, f"s{self.seed}")))

    @property
    def script(self):
        """The file to run."""
        return EXAMPLES / f"{self.job}.py"


def plan_reduced(settings):
    """The runs of the default."""
    watch = settings["watch_s"]
    runs = [Run(*line.split()) for line in settings["reduced"]]
    return [
        replace(run, watch_s=watch["fault" if run.rank is not None else "none"]) for run in runs
    ]


def plan_healthy(settings):
    """Long runs in which nothing is wrong."""
    healthy = settings["healthy"]
    return [
        Run(job, "none", tuple(arguments), seed, healthy["watch_s"])
        for seed, arguments, job in product(healthy["seeds"], healthy["sizes"], healthy["jobs"])
    ]


def plan_full(settings):
    """Every job with every fault that it can have, each size and seed; the rank that is hit goes round.

    In an order drawn once, so that what has run so far is a sample of the whole.
    """
    full, runs = settings["full"], []
    for seed, arguments, job in product(full["seeds"], full["sizes"], full["jobs"]):
        for fault in [*full["faults"], *full["own_faults"].get(job, ())]:
            hit = fault.replace(":R", f":{len(runs) % settings['ranks']}")
            runs.append(Run(job, hit, tuple(arguments), seed))
        # Runs without a fault are several alike, and their names differ.
        names = [f"{seed}-{number}" for number in range(full["healthy"])]
        runs += [Run(job, "none", tuple(arguments), name) for name in names]
    random.Random(0).shuffle(runs)
    watch = full["watch_s"]
    return [replace(run, watch_s=watch["none" if run.rank is None else "fault"]) for run in runs]
