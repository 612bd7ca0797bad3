"""A remediator on a real Slurm, on a Fleet whose answer a test sets and on time that it moves."""

from ingero.config.document import parse_document
from ingero.remediation.building import build_actuator, read_moment
from ingero.remediation.config import build_policy
from ingero.remediation.journal import Journal
from ingero.remediation.remediator import Remediator
from ingero.testing.clock import ManualClock
from ingero.testing.remediation import HandFleet, build_verdict
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S

POLICY = """\
mode: auto
listen: "127.0.0.1:0"
findings: {min_persistence: 0s}
brakes: {settle_time: 4s, max_percent_at_once: 100, max_percent_per_hour: 100,
  protected_nodes: [PROTECTED]}
"""


class RealSite:
    """A remediator on a real Slurm, on a Fleet that names a node and on time that a test moves."""

    def __init__(self, folder, slurm, text, protected="none"):
        self.path, self.slurm = folder / "journal.db", slurm
        text = POLICY.replace("PROTECTED", protected) + text
        self.config = build_policy(parse_document(text))
        self.clock, self.fleet, self.n_ops = ManualClock(), HandFleet(), 0
        self.restart()

    def restart(self):
        """Another process on the same journal."""
        self.journal = Journal(self.path)
        actuator = build_actuator(self.config, self.clock)
        self.remediator = Remediator(self.config, self.fleet, actuator, self.journal, self.now)

    def now(self):
        return read_moment(self.clock, "boot")

    def poll(self, node, seconds=2):
        self.clock.advance(int(seconds * NS_PER_S))
        self.n_ops += 1
        self.fleet.say(build_verdict(node, n_ops=self.n_ops))
        return self.remediator.poll()

    def tests(self):
        return self.journal.pair_tests.read()

    def follow_test(self, node):
        """Look until the last test has ended; it."""

        def find_ended():
            self.poll(node, 0.1)
            (*_, last) = self.tests()
            return last if last.outcome else None

        return wait_until(find_ended)

    def states(self):
        return [one.state for one in self.journal.actions()]
