"""Device taints in the small server: the rules of `DeviceTaintRule` and `ResourceSlice` that the remediator depends on.

No API server that has them can be built from what Debian has (Kubernetes 1.33 is the first). What is written is checked
against the published schemas of `kubernetes-validate`; the rest is kept here after the documentation of Kubernetes 1.37
("Device Taints and Tolerations") and the comments of its API: names that exist, versions that are served, field
selectors, preconditions of deletion, and that a change of a spec counts in ``metadata.generation``.
"""

import copy
import uuid

from tests.support.kubernetes_schemas import SchemaError, check_object

GROUP = "/apis/resource.k8s.io/"
SCHEMAS = {"v1": "1.37", "v1beta2": "1.36", "v1alpha3": "1.33"}
"""Whose schemas a version is checked against: of the last release in which a rule of it is the newest, and of v1alpha3 the
first."""
EFFECTS = {
    "v1": {"NoSchedule", "NoExecute", "None"},
    "v1beta2": {"NoSchedule", "NoExecute", "None"},
    "v1alpha3": {"NoSchedule", "NoExecute"},
}
FIELDS = {"resourceslices": {"spec.driver", "spec.nodeName"}, "devicetaintrules": set()}
KINDS = {"resourceslices": "ResourceSlice", "devicetaintrules": "DeviceTaintRule"}


class SmallDevices:
    """Rules and slices.

    Attributes:
        served: By resource, the versions that are served.
        objects: By resource and name.
        n_lists: Lists by resource.
    """

    def __init__(self, refuse):
        self.served = {
            "devicetaintrules": {"v1"},
            "resourceslices": {"v1", "v1beta2"},
        }
        self.objects = {"devicetaintrules": {}, "resourceslices": {}}
        self.n_lists = {"devicetaintrules": 0, "resourceslices": 0}
        self.version = 1
        self.refuse = refuse

    def add_slice(self, node, devices, driver="gpu.nvidia.com", generation=1, pool=None, taints=()):
        """What a driver publishes of a node's devices."""
        name = f"{node}-{driver}-{generation}"
        spec = {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": pool or node, "generation": generation, "resourceSliceCount": 1},
            "devices": [
                {"name": one, **({"taints": list(taints)} if taints else {})} for one in devices
            ],
        }
        one = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "spec": spec}
        check_object(one, "1.37")
        self._store("resourceslices", one | {"metadata": {"name": name}})

    def _store(self, resource, one):
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        one["metadata"].setdefault("uid", str(uuid.uuid4()))
        self.objects[resource][one["metadata"]["name"]] = one

    def change_rule(self, name, effect):
        """What an administrator does."""
        rule = copy.deepcopy(self.objects["devicetaintrules"][name])
        rule["spec"]["taint"]["effect"] = effect
        rule["metadata"]["generation"] += 1
        self._store("devicetaintrules", rule)

    def write_status(self, name, message):
        """What the controller that deletes pods says."""
        rule = copy.deepcopy(self.objects["devicetaintrules"][name])
        condition = {"type": "EvictionInProgress", "status": "False", "message": message}
        rule["status"] = {"conditions": [condition]}
        self._store("devicetaintrules", rule)

    def answer(self, method, path, query, check, body):
        version, resource, *rest = path.removeprefix(GROUP).split("/")
        name = rest[0] if rest else ""
        verb = {"GET": "get" if name else "list", "POST": "create", "DELETE": "delete"}[method]
        check(verb, resource)  # a server asks for rights before it says that it has no such thing
        if version not in self.served.get(resource, ()):
            self.refuse(404, "NotFound", "the server could not find the requested resource")
        if method == "POST":
            return self._create(version, resource, query, body)
        if method == "DELETE":
            return self._delete(resource, name, body)
        return self._find(resource, name) if name else self._list(version, resource, query)

    def _find(self, resource, name):
        if name not in self.objects[resource]:
            self.refuse(404, "NotFound", f'{resource} "{name}" not found')
        return self.objects[resource][name]

    def _list(self, version, resource, query):
        self.n_lists[resource] += 1
        wanted = dict(one.split("=") for one in query.get("fieldSelector", "").split(",") if one)
        if not wanted.keys() <= FIELDS[resource]:
            self.refuse(400, "BadRequest", f"field label not supported: {sorted(wanted)}")
        keys = {key: key.removeprefix("spec.") for key in wanted}
        found = [
            one
            for _, one in sorted(self.objects[resource].items())
            if all(one["spec"].get(keys[key]) == value for key, value in wanted.items())
        ]
        return {
            "kind": f"{KINDS[resource]}List", "apiVersion": f"resource.k8s.io/{version}",
            "metadata": {"resourceVersion": str(self.version)}, "items": found,
        }  # fmt: skip

    def _create(self, version, resource, query, body):
        kind = {"apiVersion": f"resource.k8s.io/{version}", "kind": KINDS[resource]}
        if {key: body.get(key) for key in kind} != kind:
            self.refuse(400, "BadRequest", f"the object is no {kind}")
        try:
            check_object(body, SCHEMAS[version])
        except SchemaError as error:
            self.refuse(422, "Invalid", str(error))
        name, effect = body["metadata"]["name"], body["spec"]["taint"]["effect"]
        if effect not in EFFECTS[version]:
            self.refuse(422, "Invalid", f'spec.taint.effect: Unsupported value: "{effect}"')
        if name in self.objects[resource]:
            self.refuse(409, "AlreadyExists", f'{resource} "{name}" already exists')
        made = copy.deepcopy(body)
        made["metadata"] |= {"generation": 1}
        made["spec"]["taint"].setdefault("timeAdded", "2026-01-01T00:00:00Z")
        if query.get("dryRun") == "All":
            return made | {"metadata": made["metadata"] | {"uid": "x"}}
        self._store(resource, made)
        return made

    def _delete(self, resource, name, body):
        meta = self._find(resource, name)["metadata"]
        wanted = body.get("preconditions") or {}
        for key, value in wanted.items():
            if meta[key] != value:
                self.refuse(409, "Conflict", f"Precondition failed: {key} is {meta[key]}")
        del self.objects[resource][name]
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "metadata": {}}
