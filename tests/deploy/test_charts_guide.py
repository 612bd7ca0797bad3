"""The commands of the guide for Kubernetes, rendered by a real Helm."""

import re
import shlex
import subprocess

import pytest
import yaml
from tests.deploy.charts import (
    CHARTS,
    HELM,
    find,
    find_pod,
    needs_helm,
)
from tests.deploy.site import BIN, ROOT

pytestmark = [pytest.mark.slow, needs_helm]


def test_helm_takes_the_commands_of_the_guide_and_the_answers_fit_each_other(tmp_path):
    guide = (ROOT / "docs/guides/kubernetes.md").read_text().replace("\\\n", " ")
    rendered, given = {}, {}
    for command in re.findall(r"^helm (?:install|upgrade) (.*)$", guide, re.MULTILINE):
        words = shlex.split(command)
        if "--reuse-values" in words:
            words = [*given[words[0]], *(word for word in words[2:] if word != "--reuse-values")]
        given[words[0]] = words
        done = subprocess.run(
            [HELM, "template", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        rendered[words[0]] = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert set(rendered) == set(CHARTS)
    (fleet,) = [
        one["data"]["fleet.yaml"]
        for one in rendered["ingero-fleet"]
        if one["kind"] == "ConfigMap" and "fleet.yaml" in one["data"]
    ]
    assert yaml.safe_load(fleet)["processors"]["nccl"]["alarm_slowdown"] == 0.2
    config = tmp_path / "fleet.yaml"
    config.write_text(fleet)
    done = subprocess.run(
        [BIN / "ingero-fleet", "validate", "--skip-files", config],
        capture_output=True, text=True, check=False, env={"ECHO_TOKEN": "of the pod's secret"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert find(rendered["ingero-echo"], "Secret")["metadata"]["name"] == "ingero-echo-tls"
    assert find(rendered["ingero-echo"], "Service")["metadata"]["name"] == "ingero-echo"
    assert find(rendered["ingero-fleet"], "Service")["metadata"]["name"] == "ingero-fleet"
    assert "--fleet" in find_pod(rendered["ingero"])["spec"]["containers"][0]["args"]
