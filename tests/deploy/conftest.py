"""One site for all tests of this folder: its programs take seconds to start, and while they run a Prometheus asks each
of them every second."""

import tempfile
from pathlib import Path

import pytest
import trustme
import yaml
from tests.deploy.site import DEPLOY, run_site
from tests.e2e.prometheus import serve_config

from ingero.testing.waiting import wait_until


@pytest.fixture(scope="package")
def site(tmp_path_factory):
    with run_site(tmp_path_factory.mktemp("site")) as running:
        yield running


@pytest.fixture(scope="package")
def scraper(site, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    with serve_config(folder, shipped_config(site, folder)) as running:
        yield running


@pytest.fixture
def prometheus(site, scraper):
    """A real Prometheus with the shipped configuration and rules, which has seen each page of the site at least twice."""
    site.push()  # what nobody pushes for five minutes is shown no more
    seen_twice = (
        "count(up == 1) == 6 and on () rate(ingero_fleet_waiting_cost_total[5m])"
        " and on () rate(ingero_echo_bearer_requests_total[5m])"
    )
    wait_until(lambda: scraper.query(seen_twice), 60)
    return scraper


def shipped_config(site, folder):
    """The shipped configuration with the addresses of this site, looking every second."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [
        str(file) for file in sorted((DEPLOY / "prometheus").glob("*.rules.yml"))
    ]
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    del jobs["ingero-trace"]
    for name, job in jobs.items():
        job["static_configs"] = [{"targets": [site.pages[name].target]}]
    (folder / "token").write_text(site.pages["ingero-echo"].token)
    jobs["ingero-echo"] |= {"scheme": "http"}
    jobs["ingero-echo"]["authorization"]["credentials_file"] = str(folder / "token")
    del jobs["ingero-echo"]["tls_config"]
    config["scrape_configs"] = list(jobs.values())
    return config


@pytest.fixture
def folder():
    """A short path: that of a Unix socket has a limit."""
    with tempfile.TemporaryDirectory(prefix="pod-") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()
