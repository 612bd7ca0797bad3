"""Every command of the guide for Slurm, in its order, in Debian's own Slurm."""

import json
import os
import re
import subprocess
from contextlib import ExitStack

import httpx
import pytest
from tests.deploy.site import BIN, ROOT, run_program
from tests.support import local_http
from tests.support.ports import free_port

from ingero.sim.cluster.slurm import build_local_nodes, run_slurm
from ingero.testing.waiting import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.xdist_group("slurm")]
GUIDE = (ROOT / "docs/guides/slurm.md").read_text()
PORTS = re.compile(r"(?<=[\w.]:)(4317|4318|8080|8081|8888|9090|13133|55679)\b")


class Controller:
    """The machine of ``slurmctld``: ports and folders of this test in the place of the guide's."""

    def __init__(self, folder, slurm):
        self.folder, self.slurm = folder, slurm
        self.ports = {}

    def place(self, text):
        text = text.replace("/etc/ingero", f"{self.folder}/etc").replace("ctl:", "localhost:")
        text = text.replace("/var/lib/ingero-remediator", str(self.folder))
        return PORTS.sub(lambda found: str(self.port(found[1])), text)

    def port(self, number):
        return self.ports.setdefault(str(number), free_port())

    def run(self, commands):
        environ = {
            **os.environ, **self.slurm.environ, "PATH": f"{BIN}:{os.environ['PATH']}",
            "SLURMD_NODENAME": "h1",
        }  # fmt: skip
        done = subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", self.place(commands)],
            cwd=self.folder, env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        for file in (self.folder / "etc").glob("*.yaml"):  # what the guide's commands wrote
            file.write_text(self.place(file.read_text()))
        return done.stdout


def test_every_command_of_the_guide_works_in_its_order(tmp_path_factory):
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
    assert len(blocks) == GUIDE.count("```") // 2 == 7
    folder = tmp_path_factory.mktemp("g")
    with ExitStack() as stack:
        slurm = stack.enter_context(run_slurm(tmp_path_factory.mktemp("s"), build_local_nodes()))
        machine = Controller(folder, slurm)
        machine.run(blocks[0])
        fleet = ("fleet", "ingero-fleet", "--config", folder / "etc/fleet.yaml")
        process, log = stack.enter_context(run_program(folder, *fleet))

        def is_up():
            assert process.poll() is None, log.read_text()
            try:
                return local_http.get(f"http://localhost:{machine.port(13133)}").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_up, 60)
        nodes = machine.run(blocks[1])
        listed = json.loads(nodes[nodes.index('{"') :])
        assert {one["node_id"] for one in listed["nodes"]} == set(slurm.nodes)
        machine.run(blocks[2])
        assert (folder / "etc/fleet-push.env").read_text().endswith("--fleet-node-id h1\n")
        assert "JOBID NAME USER NODELIST" in machine.run(blocks[3])
        assert "valid, mode dry-run, acts through slurm" in machine.run(blocks[4])
        machine.run(blocks[5])
        assert "Submitted batch job" in machine.run(blocks[6])
