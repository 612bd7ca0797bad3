"""A real Fleet that names one node, beside a real Slurm that has it."""

import itertools
from contextlib import contextmanager
from dataclasses import replace

from tests.e2e.agents import fleet_and_agents, health
from tests.e2e.test_collectives import PROTOBUF, job

from ingero.otlp.codec import encode_protobuf
from ingero.sim.launcher import launch
from ingero.testing.fleet import build_fleet_config
from ingero.wire.collectives import build_collectives

N_OPS_A_PUSH = 20
POLICY = """\
mode: {mode}
fleet: {{admin_url: {admin}, poll_interval: {poll}}}
findings: {{min_persistence: 0s, min_lost_gpu_time: 1s}}
brakes: {{settle_time: {settle}, cool_down: 0s, max_nodes_per_hour: 1000, max_percent_at_once: 100,
  max_percent_per_hour: 100}}
journal: {{file: {folder}/journal.db}}
action: {{slurm: {{requeue: true, node_names: {{node5: h2}}}}}}
"""


@contextmanager
def run_job():
    """A Fleet, and what pushes the next part of a job to it; its rank 5 on ``node5`` is slow."""
    config = build_fleet_config(nccl={"judge_interval": "100ms", "reorder_window": "100ms"})
    with fleet_and_agents(config) as agents:
        yield agents, Pushes(agents)


class Pushes:
    """The job's parts, one after the other."""

    def __init__(self, agents):
        self.agents = agents
        self.start("job")

    def start(self, cluster, slow=5):
        """Another job, of a cluster of its own."""
        self.cluster = cluster
        self.runs = [
            replace(run, rank=replace(run.rank, cluster_id=cluster))
            for run in job(slow, n_ops=4000)
        ]
        self.starts = itertools.count(0, N_OPS_A_PUSH)
        for run in self.runs:
            assert self.agents.push(health(run.rank.node_id, cluster=cluster)).status_code == 200

    def push(self):
        """The next operations of all ranks."""
        first = next(self.starts)
        for run in self.runs:
            part = replace(run, ops=run.ops[first : first + N_OPS_A_PUSH])
            body = encode_protobuf(build_collectives([part], 1_795_230_273_280_661_023))
            assert self.agents.push_raw(body, PROTOBUF, path="/v1/logs").status_code == 200

    def find_culprits(self):
        """Nodes that Fleet names now."""
        clusters = self.agents.admin("verdicts", cluster_id=self.cluster).get("clusters", [])
        return [
            one["rank"]["node_id"]
            for cluster in clusters
            for one in cluster["verdicts"]
            if one["verdict"] == "culprit"
        ]


def write_policy(folder, agents, mode="auto", poll="200ms", settle="500ms"):
    """A policy with brakes for tests; its file."""
    admin = agents.fleet.url("extensions.ingero_threshold admin")
    file = folder / "policy.yaml"
    text = POLICY.format(mode=mode, admin=admin, poll=poll, settle=settle, folder=folder)
    file.write_text(text)
    return file


def launch_remediator(file, slurm):
    """The program on this policy, until the context ends."""
    return launch("ingero.cli.programs.remediator", ["run", str(file)], environ=slurm.environ)
