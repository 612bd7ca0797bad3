"""A Kubernetes of one node in a network and mounts of its own: what `make test-kubernetes-guide` has made, really started.

Its processes are this machine's, as the host's pids of a real node are; every cgroup of it is below `GROUP`. Nobody may
enforce a network policy (the bridge plug-in does not), and names of services are those of a dnsmasq that is told them.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx
import yaml
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tests.deploy.charts import HELM
from tests.deploy.site import BIN
from tests.support import local_http

from ingero.testing.waiting import wait_until

PROGRAMS = Path(__file__).parents[2] / ".cache/kubernetes"
NODE, ADDRESS, PODS, SERVICES = "node-1", "10.200.0.1", "10.210.0.0/24", "10.220.0.0/24"
TOKEN = "of-every-part-of-this-cluster"
CGROUPS, GROUP = Path("/sys/fs/cgroup"), "ingero-kubernetes"
KEPT = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops", "vm/panic_on_oom", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes")  # fmt: skip
"""What a kubelet sets for the whole machine."""
FOLDERS = ("var/lib/kubelet", "var/log/pods", "var/log/containers", "var/lib/cni", "var/lib/ingero")
"""Of the node, whose places are fixed."""
NETWORK = f"""
set -e
mount -t tmpfs none /run
ip link set lo up
ip link add eth0 type veth peer name eth0-peer
ip address add {ADDRESS}/24 dev eth0
ip link set eth0 up
ip link set eth0-peer up
ip route add default via 10.200.0.2
sysctl -qw net.ipv4.ip_forward=1
echo ready
exec cat
"""
CONTAINERD = """
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
[grpc]
address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "registry.example/pause:1"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{folder}/cni"
"""
BRIDGE = {
    "cniVersion": "0.4.0",
    "name": "pods",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": PODS}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}


class KubernetesNode:
    """The cluster, and a person beside it with Helm and kubectl.

    Args:
        folder: For everything that it writes.
        images: Folder of archives, one an image.
        checkout: Where the person's commands are run.
    """

    def __init__(self, folder, images, checkout):
        self.folder, self.images, self.checkout = folder, images, checkout
        self._stack = ExitStack()
        self._processes = {}
        self._namespace = None
        self.environ = {
            **os.environ, "KUBECONFIG": str(folder / "kubeconfig"), "HELM_CACHE_HOME": str(folder / "helm"),
            "HELM_CONFIG_HOME": str(folder / "helm"), "HELM_DATA_HOME": str(folder / "helm"),
            "PATH": f"{folder / 'bin'}:{BIN}:{os.environ['PATH']}",
        }  # fmt: skip

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_):
        self._stack.close()

    def inside(self, *command):
        """A command line that runs on the node."""
        return ["nsenter", "-t", str(self._namespace.pid), "--mount", "--net", "--uts", *map(str, command)]  # fmt: skip

    def try_to(self, commands):
        return subprocess.run(
            self.inside("bash", "-euxo", "pipefail", "-c", f"cd {self.checkout}\n{commands}"),
            env=self.environ, capture_output=True, text=True, check=False,
        )  # fmt: skip

    def run(self, commands):
        done = self.try_to(commands)
        assert done.returncode == 0, (
            done.stdout[-3000:] + done.stderr[-3000:] + self.describe()[-6000:]
        )
        self.publish()
        return done.stdout

    def get(self, what):
        """Objects of namespace ``ingero`` and those without one."""
        done = self.try_to(f"kubectl get --namespace ingero {what} --output json")
        return json.loads(done.stdout)["items"] if done.returncode == 0 else []

    def describe(self):
        return self.try_to(
            "kubectl get pods -A -o wide; kubectl describe pods -n ingero | tail -n 60; kubectl get events -A | tail -n 20"
        ).stdout

    def publish(self):
        """Give the names of the services to dnsmasq, which reads a folder again when it changes."""
        done = self.try_to("kubectl get services --all-namespaces --output json")
        lines = [
            f"{one['spec']['clusterIP']} {one['metadata']['name']}.{one['metadata']['namespace']}.svc.cluster.local\n"
            for one in (json.loads(done.stdout)["items"] if done.returncode == 0 else ())
            if one["spec"].get("clusterIP", "None") != "None"
        ]
        made = self.folder / "services.new"
        made.write_text("".join(lines))
        made.replace(self.folder / "names/services")

    def is_ready(self, what):
        """Whether every pod of a workload runs the newest version of it and is ready."""
        done = self.try_to(f"kubectl rollout status --namespace ingero {what} --timeout=1s")
        return done.returncode == 0

    def start(self, name, *command, environ=None):
        """A daemon of the node; it ends with the node."""
        log = self._stack.enter_context((self.folder / f"{name}.log").open("wb"))
        members = CGROUPS / "pids" / f"{GROUP}-daemons/cgroup.procs"
        enter = ("sh", "-c", f'echo $$ >{members} && exec "$@"', "sh")
        self._processes[name] = subprocess.Popen(
            self.inside(*enter, *command), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env={**self.environ, **(environ or {})},
        )  # fmt: skip

    def _is_alive(self):
        for name, process in self._processes.items():
            assert process.poll() is None, (name, (self.folder / f"{name}.log").read_text()[-3000:])
        return True

    def _start(self):
        kept = {name: Path("/proc/sys", name).read_text() for name in KEPT}
        self._stack.callback(
            lambda: [Path("/proc/sys", name).write_text(text) for name, text in kept.items()]
        )
        (CGROUPS / "pids" / f"{GROUP}-daemons").mkdir(exist_ok=True)
        self._stack.callback(self._remove_groups)
        self._namespace = self._stack.enter_context(
            subprocess.Popen(
                ["unshare", "--mount", "--net", "--uts", "bash", "-c", NETWORK],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        assert self._namespace.stdout.readline() == "ready\n"
        self._write_files()
        for name in FOLDERS:
            (self.folder / "node" / name).mkdir(parents=True)
            Path("/", name).mkdir(parents=True, exist_ok=True)
            subprocess.run(
                self.inside("mount", "--bind", self.folder / "node" / name, f"/{name}"), check=True
            )
        self._start_runtime()
        self._start_control()
        self._start_node()
        wait_until(lambda: self._is_alive() and self._is_node_ready(), 300)

    def _write_files(self):
        for name in ("bin", "cni", "names", "etcd", "certificates"):
            (self.folder / name).mkdir()
        (self.folder / "bin/helm").symlink_to(HELM)
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (self.folder / "accounts.pem").write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        )
        (self.folder / "tokens.csv").write_text(f'{TOKEN},admin,1,"system:masters"\n')
        (self.folder / "containerd.toml").write_text(CONTAINERD.format(folder=self.folder))
        (self.folder / "cni/pods.conflist").write_text(json.dumps(BRIDGE))
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [
                {
                    "name": "k",
                    "cluster": {
                        "server": f"https://{ADDRESS}:6443",
                        "insecure-skip-tls-verify": True,
                    },
                }
            ],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
        }
        (self.folder / "kubeconfig").write_text(yaml.safe_dump(config))

    def _start_runtime(self):
        self.start("containerd", "containerd", "--config", self.folder / "containerd.toml")
        ctr = ("ctr", "--address", "/run/containerd/containerd.sock", "--namespace", "k8s.io")

        def answers():
            return subprocess.run(
                self.inside(*ctr, "version"), capture_output=True, check=False
            ).returncode == 0  # fmt: skip

        wait_until(lambda: self._is_alive() and answers(), 120)
        for archive in sorted(self.images.glob("*.tar")):
            subprocess.run(
                self.inside(*ctr, "images", "import", archive), check=True, capture_output=True
            )

    def _start_control(self):
        peer = "http://127.0.0.1:2380"
        self.start(
            "etcd", PROGRAMS / "etcd", "--data-dir", self.folder / "etcd", "--unsafe-no-fsync",
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
        )  # fmt: skip
        accounts = self.folder / "accounts.pem"
        self.start(
            "apiserver", PROGRAMS / "kube-apiserver", "--etcd-servers", "http://127.0.0.1:2379",
            "--cert-dir", self.folder / "certificates", "--advertise-address", ADDRESS,
            "--bind-address", "0.0.0.0", "--service-cluster-ip-range", SERVICES, "--authorization-mode", "RBAC",
            "--token-auth-file", self.folder / "tokens.csv", "--allow-privileged",
            "--service-account-issuer", "https://example", "--service-account-key-file", accounts,
            "--service-account-signing-key-file", accounts, "--kubelet-preferred-address-types", "InternalIP",
        )  # fmt: skip
        wait_until(lambda: self._is_alive() and self._says("/readyz"), 180)
        config = ("--kubeconfig", self.folder / "kubeconfig")
        self.start(
            "controllers", PROGRAMS / "kube-controller-manager", *config, "--leader-elect=false",
            "--service-account-private-key-file", accounts,
            "--root-ca-file", self.folder / "certificates/apiserver.crt", "--use-service-account-credentials=false",
        )  # fmt: skip
        self.start(
            "scheduler", PROGRAMS / "kube-scheduler", *config, "--leader-elect=false",
        )  # fmt: skip

    def _start_node(self):
        for controller in CGROUPS.iterdir():
            if controller.is_dir() and not controller.is_symlink():
                (controller / GROUP).mkdir(exist_ok=True)
        config = ("--kubeconfig", self.folder / "kubeconfig")
        self.start(
            "dnsmasq", "dnsmasq", "--keep-in-foreground", "--no-resolv", "--no-hosts", "--conf-file=/dev/null",
            f"--listen-address={ADDRESS}", "--bind-interfaces", f"--hostsdir={self.folder / 'names'}",
            "--pid-file=/run/dnsmasq.pid", "--user=root", "--local=/cluster.local/",
        )  # fmt: skip
        self.start(
            "proxy", PROGRAMS / "kube-proxy", *config, "--hostname-override", NODE, "--proxy-mode", "iptables",
            "--masquerade-all", "--cluster-cidr", PODS, "--conntrack-max-per-core", "0",
        )  # fmt: skip
        self.start(
            "kubelet", PROGRAMS / "kubelet", *config, "--hostname-override", NODE, "--node-ip", ADDRESS,
            "--container-runtime", "remote",
            "--container-runtime-endpoint", "unix:///run/containerd/containerd.sock",
            "--cgroup-driver", "cgroupfs", "--cgroup-root", f"/{GROUP}", "--cluster-dns", ADDRESS,
            "--cluster-domain", "cluster.local", "--anonymous-auth", "--authorization-mode", "AlwaysAllow",
            "--fail-swap-on=false", "--eviction-hard", "memory.available<50Mi", "--cert-dir", self.folder / "kubelet",
            "--image-gc-high-threshold", "100", "--resolv-conf", "", "--node-labels", "nvidia.com/gpu.present=true",
        )  # fmt: skip

    def _says(self, path):
        done = self.try_to(
            f"curl -ksf -H 'Authorization: Bearer {TOKEN}' https://{ADDRESS}:6443{path}"
        )
        return done.returncode == 0

    def _is_node_ready(self):
        return any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for node in self.get("nodes")
            for condition in node["status"]["conditions"]
        )

    def _remove_groups(self):
        """End what is left in the cluster's cgroups, and remove them."""

        tops = [
            controller / name for controller in CGROUPS.iterdir() for name in (GROUP, f"{GROUP}-daemons")
        ]  # fmt: skip

        def is_empty():
            left = [Path(one) for top in tops for one, _, _ in os.walk(top, topdown=False)]
            for folder in left:
                _end(folder)
            return not any(folder.is_dir() for folder in left)

        wait_until(is_empty, 120)
        for process in self._processes.values():
            process.wait(60)


def _end(folder):
    """End the processes of a cgroup and remove it, if it is empty by now."""
    for pid in (folder / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    with contextlib.suppress(OSError):
        folder.rmdir()


def is_there():
    """Whether this machine has what a node is made of."""
    programs = ("kube-apiserver", "kubelet", "kube-proxy", "etcd")
    tools = (
        "containerd",
        "runc",
        "dnsmasq",
        "kubectl",
        "unshare",
        "nsenter",
        "iptables",
        "conntrack",
    )
    return all((PROGRAMS / one).exists() for one in programs) and all(map(shutil.which, tools))


def ask(url):
    """What a port that is forwarded answers; None while it does not."""
    try:
        answer = local_http.get(url, timeout=10)
    except httpx.TransportError:
        return None
    return answer if answer.status_code == 200 else None
