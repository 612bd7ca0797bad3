"""What is done to a site, each for some seconds, and then undone."""

import pathlib
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

from tests.chaos.history import Fault

_BLOCK = 65_536


@dataclass(frozen=True)
class Kind:
    """A kind of fault: how often it is chosen, and its parts' names."""

    name: str
    weight: int
    needs_root: bool = False


KINDS = (
    Kind("kill receiver", 2),
    Kind("kill judge", 4),
    Kind("kill nats-server", 2),
    Kind("kill echo", 2),
    Kind("pause fleet", 3),
    Kind("pause nats-server", 1),
    Kind("pause echo", 1),
    Kind("partition", 3, needs_root=True),
    Kind("full disk of fleet", 1, needs_root=True),
    Kind("full disk of echo", 1, needs_root=True),
    Kind("full disk of nats-server", 1, needs_root=True),
    Kind("clock of agents", 1),
    Kind("clock of receiver", 1),
)


class Faults:
    """Chooses and does them, one after the other.

    Args:
        site: What they are done to.
        workload: Its agents.
        random: Chooses.
        began_s: When the history began.
    """

    def __init__(self, site, workload, random, began_s):
        self._site = site
        self._workload = workload
        self._random = random
        self._began_s = began_s
        self.kinds = [one for one in KINDS if site.is_isolated or not one.needs_root]
        self.left_out = [one.name for one in KINDS if one not in self.kinds]

    def do_one(self):
        """One fault, from its beginning to its end."""
        (kind,) = self._random.choices(self.kinds, [one.weight for one in self.kinds])
        start_s = time.monotonic() - self._began_s
        target = getattr(self, f"_{kind.name.replace(' ', '_').replace('-', '_')}")()
        return Fault(kind.name, target, start_s, time.monotonic() - self._began_s)

    def _stay(self, longest_s):
        time.sleep(self._random.uniform(0.0, longest_s))

    def _kill(self, part, away_s):
        part.kill()
        self._stay(away_s)
        part.begin()
        return part.name

    def _kill_receiver(self):
        return self._kill(self._site.fleets[0], 2.0)

    def _kill_judge(self):
        return self._kill(self._random.choice(self._site.fleets[1:]), 2.0)

    def _kill_nats_server(self):
        return self._kill(self._site.nats, 1.0)

    def _kill_echo(self):
        return self._kill(self._site.echo, 3.0)

    def _pause(self, part, longest_s):
        part.send(signal.SIGSTOP)
        self._stay(longest_s)
        part.send(signal.SIGCONT)
        return part.name

    def _pause_fleet(self):
        return self._pause(self._random.choice(self._site.fleets), 6.0)

    def _pause_nats_server(self):
        return self._pause(self._site.nats, 2.0)

    def _pause_echo(self):
        return self._pause(self._site.echo, 6.0)

    def _partition(self):
        at = self._random.randrange(len(self._site.fleets))
        self._site.cut(at, is_cut=True)
        self._stay(6.0)
        self._site.cut(at, is_cut=False)
        return self._site.fleets[at].name

    def _fill(self, name):
        filler = self._site.disks[name] / "filler"
        with filler.open("wb", 0) as file, suppress(OSError):
            while file.write(bytes(_BLOCK)):
                pass
        self._stay(4.0)
        pathlib.Path(filler).unlink()
        return name

    def _full_disk_of_fleet(self):
        return self._fill(f"fleet-{self._random.randrange(len(self._site.fleets))}")

    def _full_disk_of_echo(self):
        return self._fill("echo")

    def _full_disk_of_nats_server(self):
        """With a restart: a nats-server whose disk was full takes nothing before that."""
        self._fill("nats")
        return self._kill(self._site.nats, 0.0)

    def _clock_of_agents(self):
        clock = self._random.choice(self._workload.clocks)
        clock.step_ns = self._random.randint(-7200, 7200) * 10**9
        self._stay(3.0)
        return "an agent"

    def _clock_of_receiver(self):
        self._site.step_clock(self._random.randint(-7200, 7200))
        self._stay(3.0)
        self._site.step_clock(0)
        return "fleet 0"
