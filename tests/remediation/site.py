"""A remediator on a Fleet and a scheduler whose answers a test sets, and on time that it moves."""

from dataclasses import dataclass, field

from ingero.config.document import parse_document
from ingero.remediation.building import read_moment
from ingero.remediation.config import build_policy
from ingero.remediation.journal import Journal
from ingero.remediation.remediator import Remediator
from ingero.testing.clock import ManualClock
from ingero.testing.remediation import HandFleet, HandPairScheduler, build_verdict
from ingero.units import NS_PER_S

QUICK = "findings: {min_persistence: 4s}\nbrakes: {settle_time: 4s, max_percent_at_once: 100, max_percent_per_hour: 100"
"""A policy whose brakes let one action through after a few polls; a test closes the braces."""
NODES = ("n1", "n2", "n3", "n4")


def build_config(text="", mode="auto", brakes=""):
    """A policy with quick brakes."""
    head = f"mode: {mode}\naction: {{slurm: {{}}}}\n{QUICK}{', ' if brakes else ''}{brakes}}}\n"
    return build_policy(parse_document(head + text))


@dataclass
class Site:
    """All of it. A poll is every two seconds."""

    path: object
    config: object
    clock: ManualClock = field(default_factory=ManualClock)
    fleet: HandFleet = field(default_factory=HandFleet)
    before: object = lambda _: None
    n_ops: int = 0
    is_audited: bool = False

    def __post_init__(self):
        self.slurm = HandPairScheduler(NODES, self.clock.mono_ns, self._reach)
        self.start()

    def _reach(self, what):
        self.before(what)

    def start(self):
        """A new process on the same journal."""
        self.journal = Journal(self.path, is_audited=self.is_audited)
        self.remediator = Remediator(
            self.config,
            self.fleet,
            self.slurm,
            self.journal,
            lambda: read_moment(self.clock, "boot"),
        )

    def poll(self, times=1, culprits=None):
        """Look so many times, with these culprits; None leaves what Fleet says as it is."""
        result = None
        for _ in range(times):
            self.clock.advance(2 * NS_PER_S)
            if culprits is not None:
                self.n_ops += 1
                self.fleet.say(*(build_verdict(node, n_ops=self.n_ops) for node in culprits))
            result = self.remediator.poll()
        return result

    @property
    def drained(self):
        """Nodes that are out of service by us."""
        return {name for name, node in self.slurm.nodes.items() if node.mark}

    def states(self):
        """State of each action, oldest first."""
        return [one.state.value for one in self.journal.actions()]
