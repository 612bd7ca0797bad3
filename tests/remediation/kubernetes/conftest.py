import base64
import json
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import yaml
from tests.deploy.charts import DEPLOY, HELM, helm
from tests.remediation.kubernetes.real_server import PROGRAMS, READER, REMEDIATOR, run_real_server
from tests.remediation.kubernetes.small_server import ADMIN, run_small_server

from ingero.remediation.actuators.kubernetes import KubernetesActuator
from ingero.remediation.kubernetes_config import KubernetesConfig
from ingero.testing.clock import ManualClock

RIGHTS = {("get", "nodes"), ("list", "nodes"), ("patch", "nodes"), ("patch", "nodes/status")}
BINDING = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "remediator"},
    "roleRef": {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "remediator",
    },
    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "remediator"}],
}


def build_node(name, ready="True", taints=(), **spec):
    """A node as a kubelet registers it."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/hostname": f"host-{name}", "pool": "gpu"},
        },
        "spec": {**spec, **({"taints": list(taints)} if taints else {})},
        "status": {
            "capacity": {"cpu": "8", "memory": "64Gi", "pods": "110"},
            "allocatable": {"cpu": "8", "memory": "64Gi", "pods": "110"},
            "addresses": [{"type": "InternalDNS", "address": f"{name}.cluster.site"}],
            "conditions": [
                {
                    "type": "Ready",
                    "status": ready,
                    "reason": "KubeletReady",
                    "message": "kubelet is posting",
                }
            ],
        },
    }


@dataclass
class Api:
    """A server with four nodes, and how a test reaches it.

    Attributes:
        server: Small or real.
        folder: For kubeconfigs.
        stack: Ends what was connected.
    """

    server: object
    folder: Path
    stack: ExitStack

    def kubeconfig(self, token=REMEDIATOR, **cluster):
        """A file for one who has this bearer."""
        if hasattr(self.server, "authority"):
            pem = self.server.authority.read_bytes()
            cluster.setdefault("certificate-authority-data", base64.b64encode(pem).decode())
        text = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": self.server.url, **cluster}}],
            "users": [{"name": "u", "user": {"token": token}}],
        }
        file = self.folder / f"{token}.yaml"
        file.write_text(yaml.safe_dump(text))
        return str(file)

    def actuator(self, token=REMEDIATOR, clock=None, **config):
        """Of the remediator, or of another bearer."""
        settings = KubernetesConfig(kubeconfig=self.kubeconfig(token), timeout="20s", **config)
        actuator = KubernetesActuator(settings, clock or ManualClock())
        self.stack.callback(actuator.close)
        return actuator

    def node(self, name):
        """As the administrator sees it."""
        return self.admin.get(name)

    @cached_property
    def admin(self):
        """The administrator."""
        admin = Admin(self.kubeconfig(ADMIN))
        self.stack.callback(admin.client.close)
        return admin


class Admin:
    """What a person does with kubectl."""

    def __init__(self, kubeconfig):
        from lightkube import Client, KubeConfig
        from lightkube.resources.core_v1 import Node, NodeStatus
        from lightkube.types import PatchType

        self.client = Client(KubeConfig.from_file(kubeconfig).get())
        self.kinds, self.types = (Node, NodeStatus), PatchType

    def get(self, name):
        return self.client.get(self.kinds[0], name).to_dict()

    def patch(self, name, **patch):
        self.client.patch(self.kinds[0], name, patch, patch_type=self.types.MERGE)

    def set_ready(self, name, status):
        condition = {"type": "Ready", "status": status, "reason": "Test", "message": ""}
        self.client.patch(self.kinds[1], name, {"status": {"conditions": [condition]}})


def read_role(action):
    """The rights that the chart gives a remediator of this action, by a real Helm."""
    policy = {"action": action}
    status, text = helm(
        "template", "x", str(DEPLOY / "helm/ingero-fleet"), "--set-json",
        f"remediator={json.dumps({'enabled': True, 'policy': policy})}",
    )  # fmt: skip
    assert status == 0, text
    (role,) = [one for one in yaml.safe_load_all(text) if one and one["kind"] == "ClusterRole"]
    role["metadata"] = {"name": "remediator"}
    return role


@pytest.fixture(scope="session")
def real_server(tmp_path_factory):
    with run_real_server(tmp_path_factory.mktemp("kubernetes")) as server:
        server.post(
            "/apis/rbac.authorization.k8s.io/v1/clusterroles", read_role({"kubernetes": {}})
        )
        server.post("/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", BINDING)
        yield server


@pytest.fixture(
    params=[
        "small",
        pytest.param("real", marks=[pytest.mark.slow, pytest.mark.xdist_group("kubernetes")]),
    ]
)
def api(request, tmp_path):
    """A server with four nodes, whose remediator has the rights of the chart."""
    if request.param == "real":
        if not all(one.exists() for one in PROGRAMS):
            pytest.skip("no API server was built: scripts/install_kubernetes")
        if not HELM:
            pytest.skip("no Helm, which renders the remediator's rights: scripts/install_helm")
        server = request.getfixturevalue("real_server")
        server.clear()
        fill(server)
        with ExitStack() as stack:
            yield Api(server, tmp_path, stack)
        return
    with run_small_server() as server, ExitStack() as stack:
        server.rights |= {REMEDIATOR: RIGHTS, READER: {("get", "nodes"), ("list", "nodes")}}
        fill(server)
        yield Api(server, tmp_path, stack)


def fill(server):
    for number in range(1, 5):
        server.create(build_node(f"n{number}"))
