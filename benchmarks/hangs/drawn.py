"""Hangs drawn by chance: size of the job, collectives, groups, fault, rank and step follow from a seed.

No rule about whom to name was changed after an answer on one of these was seen; `cases` was looked at while they were
written.
"""

import random
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from benchmarks.hangs.cases.registry import Case, announce, freeze, ones, stand

KINDS = (
    "all_reduce",
    "all_gather",
    "broadcast",
    "reduce",
    "barrier",
    "all_to_all",
    "gather",
    "scatter",
)
FAULTS = (
    "late", "frozen", "another collective", "another size", "two at once", "subgroup that all wait for", "subgroup", "skipped",
    "point to point", "two groups", "asynchronous", "nobody",
)  # fmt: skip


def enter(kind, rank, n, root):
    """Enter one collective of the default group."""
    outputs = [ones(8) for _ in range(n)]
    at_root = [ones(8) for _ in range(n)] if rank == root else None
    {
        "all_reduce": lambda: dist.all_reduce(ones(8)),
        "all_gather": lambda: dist.all_gather(outputs, ones(8)),
        "broadcast": lambda: dist.broadcast(ones(8), root),
        "reduce": lambda: dist.reduce(ones(8), root),
        "barrier": dist.barrier,
        "all_to_all": lambda: dist.all_to_all_single(ones(n), ones(n)),
        "gather": lambda: dist.gather(ones(8), at_root, root),
        "scatter": lambda: dist.scatter(ones(8), at_root, root),
    }[kind]()


@dataclass
class Drawn:
    """One job as its seed gives it."""

    seed: int
    n: int = 0
    fault: str = ""
    culprits: tuple = ()
    kinds: list = field(default_factory=list)
    root: int = 0
    first_bad: int = 0
    members: list = field(default_factory=list)
    pause_s: float = 0

    def __post_init__(self):
        draw = random.Random(self.seed)
        self.n = draw.randint(2, 8)
        self.fault = draw.choice(FAULTS)
        # Two of two would leave nobody who waits: a job of which nothing hangs in a collective.
        n_culprits = 2 if self.fault == "two at once" and self.n > 2 else 1
        self.culprits = tuple(sorted(draw.sample(range(self.n), n_culprits)))
        self.kinds = [draw.choice(KINDS) for _ in range(4)]
        self.root = draw.randrange(self.n)
        self.first_bad = draw.randint(3, 30)
        self.members = sorted(draw.sample(range(self.n), draw.randint(2, max(2, self.n - 1))))
        self.pause_s = draw.choice([0, 0.002, 0.01, 0.05])
        if self.fault.startswith("subgroup"):
            self.culprits = (draw.choice(self.members),)

    def as_case(self):
        """The job for `make`."""
        at_fault = () if self.fault == "nobody" else self.culprits
        kind = {"frozen": "dead"}.get(self.fault, self.fault)
        return Case(f"seed_{self.seed}", kind, self.n, at_fault, self.run)

    def run(self, rank, _n):
        """What one rank does."""
        groups = self.make_groups()
        step = 0
        while True:
            step += 1
            if self.fault != "nobody" and step == self.first_bad:
                self.hang(rank, groups)
            self.enter_all(rank, groups)
            time.sleep(self.pause_s)

    def make_groups(self):
        """The default group's parts that this job uses, by their ranks."""
        parts = []
        if self.fault.startswith("subgroup"):
            parts = [self.members]
        elif self.fault == "two groups" and self.n > 3:
            parts = [range(self.n // 2), range(self.n // 2, self.n)]
        return {tuple(part): dist.new_group(list(part)) for part in parts}

    def enter_all(self, rank, groups):
        """One healthy step."""
        for ranks, group in groups.items():
            if rank in ranks:
                dist.all_reduce(ones(), group=group)
        if self.fault == "point to point":
            receiver = (self.culprits[0] + 1) % self.n
            if rank == self.culprits[0]:
                dist.send(ones(), receiver)
            if rank == receiver:
                dist.recv(ones(), self.culprits[0])
        for kind in self.kinds:
            enter(kind, rank, self.n, self.root)

    def hang(self, rank, groups):
        """What is different in the step that hangs."""
        is_culprit = rank in self.culprits
        if self.fault == "frozen":
            if is_culprit:
                freeze()
        elif self.fault in {"another collective", "another size", "skipped"}:
            announce()
            self.differ(rank, is_culprit=is_culprit)
        elif self.fault == "asynchronous":
            works = [dist.all_reduce(ones(), async_op=True) for _ in range(2 if is_culprit else 5)]
            if is_culprit:
                stand()
            for work in works:
                work.wait()
        elif is_culprit:
            stand()
        elif self.fault == "subgroup":
            self.wait_in_part(rank, groups)

    def differ(self, rank, *, is_culprit):
        """The culprit enters another collective, another size, or leaves out an all-gather before what all do."""
        if self.fault == "another collective":
            enter("barrier" if is_culprit else "all_reduce", rank, self.n, self.root)
        elif self.fault == "another size":
            dist.all_reduce(torch.ones(5 if is_culprit else 4))
        else:
            if not is_culprit:
                enter("all_gather", rank, self.n, self.root)
            enter("all_reduce", rank, self.n, self.root)

    def wait_in_part(self, rank, groups):
        """Members of the part wait for the culprit there; ranks outside of it do other things of their own."""
        for ranks, group in groups.items():
            if rank in ranks:
                dist.all_reduce(ones(), group=group)
        time.sleep(600)
