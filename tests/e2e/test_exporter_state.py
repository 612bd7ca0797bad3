"""A Prometheus that goes away, written to and scraping: health and pages say so."""

import time

import pytest
from tests.e2e.prometheus import needs_prometheus, serve_config
from tests.support import local_http

from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.testing.waiting import wait_until


def build_config(write_to):
    config = build_fleet_config()
    config["exporters"]["prometheusremotewrite"] = {
        "endpoint": f"{write_to}/api/v1/write",
        "retry_on_failure": {"initial_interval": "100ms", "max_interval": "200ms"},
    }
    config["extensions"] |= {
        "bearertokenauth": {"token": "t"},
        "healthee": {"endpoint": "127.0.0.1:0", "auth": {"authenticator": "bearertokenauth"}},
        "zpages": {"endpoint": "127.0.0.1:0"},
    }
    service = config["service"]
    service["extensions"] += ["bearertokenauth", "healthee", "zpages"]
    service["pipelines"]["metrics"]["exporters"].append("prometheusremotewrite")
    return config


def push(fleet):
    point = {"timeUnixNano": str(time.time_ns()), "asDouble": 1}
    metric = {"name": "m", "gauge": {"dataPoints": [point]}}
    body = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [metric]}]}]}
    url = f"http://{fleet.addresses['receivers.otlp http']}/v1/metrics"
    assert local_http.post(url, json=body).status_code == 200


@needs_prometheus
@pytest.mark.slow
def test_a_prometheus_that_is_away_is_seen_in_health_and_on_pages(tmp_path):
    def read_state(fleet):
        url = f"http://{fleet.addresses['extensions.healthee']}/internal/ee/state"
        return local_http.get(url, headers={"authorization": "Bearer t"}).json()

    scrape = {
        "job_name": "fleet", "scrape_interval": "1s", "scrape_timeout": "1s",
        "file_sd_configs": [{"files": [str(tmp_path / "targets.json")], "refresh_interval": "1s"}],
    }  # fmt: skip
    flag = "--web.enable-remote-write-receiver"
    with (
        serve_config(tmp_path, {"scrape_configs": [scrape]}, flag) as prometheus,
        run_fleet(build_config(prometheus.url)) as fleet,
    ):
        target = fleet.addresses["exporters.prometheus"]
        (tmp_path / "targets.json").write_text(f'[{{"targets": ["{target}"]}}]')
        push(fleet)

        def is_well():
            state = read_state(fleet)
            (sent,), (scraped,) = state["exporters"], state["scraped"]
            return sent["n_sent"] and scraped["interval_s"] and state["degraded"] == []

        wait_until(is_well)
        prometheus.stop()
        push(fleet)
        found = wait_until(lambda: len(state := read_state(fleet)["degraded"]) == 2 and state, 60)
        assert "prometheusremotewrite: its destination has taken nothing for" in found[0]
        assert prometheus.url.removeprefix("http://") in found[0]
        assert "refused" in found[0]
        assert "exporters.prometheus: nobody has scraped it for" in found[1]
        (sent,) = read_state(fleet)["exporters"]
        assert sent["n_waiting"] + sent["n_retries"] >= 1
        page = local_http.get(f"http://{fleet.addresses['extensions.zpages']}/debug/exporterz")
        assert all(text.partition(": ")[2][:20] in page.text for text in found)
