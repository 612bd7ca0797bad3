"""Rendering the Helm charts, and starting a rendered container's command as a process of this machine."""

import base64
import json
import os
import re
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
import yaml
from tests.deploy.site import BIN, DEPLOY, ROOT
from tests.support.ports import free_port

HELM = shutil.which("helm") or (
    str(ROOT / ".cache/helm") if (ROOT / ".cache/helm").exists() else None
)
needs_helm = pytest.mark.skipif(HELM is None, reason="helm is not installed: scripts/install_helm")
CHARTS = ("ingero", "ingero-echo", "ingero-fleet")
ADDRESS = re.compile(r"(?<![\d.])(?:0\.0\.0\.0|127\.0\.0\.1):(\d+)")
WORKLOADS = {"DaemonSet", "Deployment", "StatefulSet"}


def helm(*arguments):
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@cache
def _render(chart, values):
    arguments = [part for value in json.loads(values) for part in ("--set-json", value)]
    done = subprocess.run(
        [HELM, "template", "site", str(DEPLOY / "helm" / chart), "--namespace", "gpu", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def render(chart, **values):
    """Objects of a release ``site`` in namespace ``gpu``; values by their first key, a dict for sections."""
    given = json.dumps([f"{key}={json.dumps(value)}" for key, value in values.items()])
    return [one for one in yaml.load_all(_render(chart, given), yaml.CSafeLoader) if one]


def find(objects, kind):
    """The only object of a kind."""
    (found,) = [one for one in objects if one["kind"] == kind]
    return found


def find_pod(objects):
    """The pod of the only workload."""
    (found,) = [one["spec"]["template"] for one in objects if one["kind"] in WORKLOADS]
    return found


class Node:
    """A machine that runs containers of one pod as processes: mounts are folders, ports are free ones of loopback.

    Args:
        folder: Where its files go.
        objects: What was rendered.
        secrets: Of the cluster, beside rendered ones: bytes by key, by name.
    """

    def __init__(self, folder, objects, secrets=None):
        self.folder = Path(folder)
        self.pod = find_pod(objects)["spec"]
        self.ports = {}
        self._files = {
            one["metadata"]["name"]: {key: text.encode() for key, text in one["data"].items()}
            for one in objects
            if one["kind"] == "ConfigMap"
        }
        self._secrets = {
            one["metadata"]["name"]: {
                key: base64.b64decode(text) for key, text in one["data"].items()
            }
            for one in objects
            if one["kind"] == "Secret"
        } | (secrets or {})
        claims = find_claims(objects)
        volumes = [*self.pod["volumes"], *({"name": name} for name in claims)]
        self._volumes = {volume["name"]: self._fill(volume) for volume in volumes}

    def port(self, number):
        """The port of loopback that stands for a port of the container."""
        return self.ports.setdefault(int(number), free_port())

    def container(self, name):
        containers = [*self.pod.get("initContainers", ()), *self.pod["containers"]]
        (found,) = [one for one in containers if one["name"] == name]
        return found

    def command(self, name):
        """The exact command line, with places of this node."""
        container = self.container(name)
        environ = self.environ(name)
        words = [*container["command"], *container["args"]]
        words = [re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], word) for word in words]
        return [str(BIN / words[0]), *(self._place(word, container) for word in words[1:])]

    def environ(self, name):
        found = {}
        for entry in self.container(name).get("env", ()):
            source = entry.get("valueFrom", {})
            if "secretKeyRef" in source:
                ref = source["secretKeyRef"]
                found[entry["name"]] = self._secrets[ref["name"]][ref["key"]].decode()
            else:
                found[entry["name"]] = entry.get("value", "node-1")
        return found

    @contextmanager
    def start(self, name):
        """The container's process and the file of its output."""
        for mount in self.container(name)["volumeMounts"]:
            for file in (self._volumes[mount["name"]]).glob("*.yaml"):
                file.write_text(self._place(file.read_text(), self.container(name)))
        log = self.folder / f"{name}.log"
        with ExitStack() as stack:
            out = stack.enter_context(log.open("wb"))
            environ = {**os.environ, **self.environ(name), "PYTHONUNBUFFERED": "1"}
            process = subprocess.Popen(self.command(name), stdout=out, stderr=out, env=environ)
            try:
                yield process, log
            finally:
                process.terminate()
                process.wait(60)

    def probe(self, name, kind):
        """Address that the kubelet would ask."""
        container = self.container(name)
        asked = container[kind]["httpGet"]
        (number,) = [
            one["containerPort"] for one in container["ports"] if one["name"] == asked["port"]
        ]
        return f"http://127.0.0.1:{self.port(number)}{asked['path']}"

    def secret(self, name):
        return self._secrets[name]

    def _fill(self, volume):
        folder = self.folder / "volumes" / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            files, mode = self._files[volume["configMap"]["name"]], 0o644
        elif "secret" in volume:
            files, mode = self._secrets[volume["secret"]["secretName"]], 0o440  # as fsGroup has it
        else:
            return folder
        for key, content in files.items():
            (folder / key).touch(mode=0o600)
            (folder / key).chmod(0o600)
            (folder / key).write_bytes(content)
            (folder / key).chmod(mode)
        return folder

    def _place(self, text, container):
        mounts = {
            mount["mountPath"]: self._volumes[mount["name"]] for mount in container["volumeMounts"]
        }
        paths = "|".join(map(re.escape, sorted(mounts, key=len, reverse=True)))
        text = re.sub(rf"(?<![\w/])({paths})(?=/|$)", lambda found: str(mounts[found[1]]), text)
        return ADDRESS.sub(lambda found: f"127.0.0.1:{self.port(found[1])}", text)


def find_claims(objects):
    return [
        claim["metadata"]["name"]
        for one in objects
        for claim in one.get("spec", {}).get("volumeClaimTemplates", ())
    ]
