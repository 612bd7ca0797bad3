"""Money per minute in a real Prometheus, by a recording rule over Fleet's sums."""

import pytest
import yaml
from tests.deploy.site import DEPLOY
from tests.e2e.agents import fleet_and_agents, health, set_resource
from tests.e2e.prometheus import needs_prometheus, run_prometheus
from tests.e2e.test_collectives import N_RANKS, PROTOBUF, job

from ingero.otlp.codec import encode_protobuf
from ingero.testing.fleet import build_fleet_config
from ingero.testing.waiting import wait_until
from ingero.wire.collectives import build_collectives

pytestmark = pytest.mark.slow
H100 = "NVIDIA H100 80GB HBM3"
RULES = yaml.safe_load((DEPLOY / "prometheus/ingero-cost.rules.yml").read_text())


@needs_prometheus
def test_a_recording_rule_says_dollars_a_minute_by_culprit_provider_and_model(tmp_path):
    nccl = {
        "judge_interval": "100ms",
        "reorder_window": "100ms",
        "cost_interval": "500ms",
        "rates": {"currency": "USD", "providers": {"aws": {H100: 12.0}}},
    }
    with fleet_and_agents(build_fleet_config(nccl=nccl)) as agents:
        for rank in range(N_RANKS):
            body = set_resource(health(f"node{rank}", cluster="job"), provider="aws")
            assert agents.push(body).status_code == 200
        targets = {"pipeline": agents.fleet.addresses["exporters.prometheus"]}
        with run_prometheus(tmp_path, targets, RULES) as prometheus:
            started = iter(range(1000))

            def push_part():
                part = next(started)
                for run in job(slow=5):
                    run.ops["seq"] += 300 * part
                    run.ops["entry_ns"] += part * 10_000_000_000_000
                    body = encode_protobuf(build_collectives([run], 1_795_230_273_280_661_023))
                    agents.push_raw(body, PROTOBUF, path="/v1/logs")

            def rate():
                push_part()
                return prometheus.number(
                    'ingero:event_cost_rate_1m{cluster_id="job",node_id="node5",provider="aws",'
                    f'gpu_model="{H100}",currency="USD"}} > 0'
                )

            assert wait_until(rate, 60) > 0
            # Both of one scrape, which may be older than the last part's money: it is counted each `cost_interval`.
            an_hour = (
                '3600 * sum(ingero_fleet_waiting_cost_total{attributed="charged"})'
                ' / sum(ingero_fleet_waiting_gpu_seconds_total{attributed="charged"})'
            )
            wait_until(lambda: prometheus.number(an_hour) == pytest.approx(12.0, rel=0.01), 30)
