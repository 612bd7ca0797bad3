"""The agent's pod puts the NCCL plug-in where jobs of its node can mount it."""

import subprocess

import pytest
from tests.deploy.charts import Node, find, needs_helm, render

from ingero.agent.collectives.plugin import NAME, find_plugin

pytestmark = [pytest.mark.slow, needs_helm]


def test_the_first_container_copies_the_plug_in_to_the_folder_of_the_node(tmp_path):
    objects = render("ingero", ncclPlugin={"hostPath": "/opt/ingero"})
    node = Node(tmp_path, objects)
    done = subprocess.run(
        node.command("nccl-plugin"),
        env=node.environ("nccl-plugin"),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "volumes/nccl-plugin" / NAME).read_bytes() == find_plugin().read_bytes()
    (volume,) = [one for one in node.pod["volumes"] if one["name"] == "nccl-plugin"]
    assert volume["hostPath"] == {"path": "/opt/ingero", "type": "DirectoryOrCreate"}
    rights = node.container("nccl-plugin")["securityContext"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize(
    "values", [{}, {"ncclPlugin": None}], ids=["default", "an older release's"]
)
def test_unless_a_folder_is_named_nothing_is_copied_to_the_node(values):
    pod = find(render("ingero", **values), "DaemonSet")["spec"]["template"]["spec"]
    assert "initContainers" not in pod
    assert "nccl-plugin" not in {volume["name"] for volume in pod["volumes"]}
