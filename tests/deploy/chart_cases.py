"""Values to render the charts with, and what comes of them."""

from tests.deploy.charts import render

SWITCHES = {
    "ingress": {"enabled": True, "host": "x.example", "className": "nginx"},
    "podDisruptionBudget": {"enabled": True},
    "serviceMonitor": {"enabled": True},
}


CASES = {
    "fleet": ("ingero-fleet", {}),
    "fleet-all": (
        "ingero-fleet",
        {
            **SWITCHES,
            "replicaCount": 2,
            "tls": {"secretName": "fleet-tls", "clientCa": True},
            "auth": {"secretName": "fleet-auth"},
            "echo": {"endpoint": "https://ingero-echo:4318", "caSecret": {"name": "echo-ca"}},
            "config": {
                "rates": {"currency": "USD"},
                "overrides": {"processors": {"nccl": {"patience": "2m"}}},
            },
            "networkPolicy": {"agents": [{"podSelector": {}}], "monitoring": [{"podSelector": {}}]},
            "nodeSelector": {"a": "b"},
        },
    ),
    "fleet-remediator": (
        "ingero-fleet",
        {
            "remediator": {
                "enabled": True,
                "policy": {
                    "mode": "ask",
                    "action": {"webhook": {"url": "https://remedy.example:8443/ingero"}},
                },
                "webhookSecret": {"name": "webhook"},
                "journalClaim": "journal",
            }
        },
    ),
    "fleet-remediator-kubernetes": (
        "ingero-fleet",
        {
            "remediator": {
                "enabled": True,
                "policy": {"mode": "auto", "action": {"kubernetes": {"cordon": True}}},
                "journalClaim": "journal",
            }
        },
    ),
    "fleet-remediator-device": (
        "ingero-fleet",
        {
            "remediator": {
                "enabled": True,
                "policy": {"action": {"kubernetes_device": {"effect": "None"}}},
            }
        },
    ),
    "fleet-remediator-link": (
        "ingero-fleet",
        {
            "remediator": {
                "enabled": True,
                "policy": {
                    "mode": "ask",
                    "action": {"kubernetes": {}},
                    "approval": {"link": {"base_url": "https://remedy.example"}},
                },
                "approvalSecret": {"name": "approval"},
                "journalClaim": "journal",
            },
            "networkPolicy": {"approval": [{"namespaceSelector": {"matchLabels": {"a": "b"}}}]},
        },
    ),
    "fleet-remediator-audit": (
        "ingero-fleet",
        {
            "echo": {"endpoint": "https://ingero-echo:4318/", "caSecret": {"name": "echo-ca"}},
            "remediator": {
                "enabled": True,
                "policy": {
                    "mode": "ask",
                    "action": {"webhook": {"url": "https://[fd00::1]:8443/a:1"}},
                    "approval": {
                        "link": {
                            "base_url": "https://remedy.example",
                            "labels": ["ana", "bot"],
                            "send": [
                                {
                                    "label": "ana",
                                    "slack": {"webhook_url_file": "/etc/ingero/approval/slack"},
                                },
                                {
                                    "label": "bot",
                                    "webhook": {
                                        "url": "https://bot.example:9443/ingero",
                                        "secret_file": "/etc/ingero/approval/bot",
                                    },
                                },
                            ],
                        }
                    },
                },
                "approvalSecret": {"name": "approval"},
                "webhookSecret": {"name": "webhook"},
                "journalClaim": "journal",
            },
        },
    ),
    "fleet-remediator-nvsentinel": (
        "ingero-fleet",
        {"remediator": {"enabled": True, "policy": {"action": {"nvsentinel": {}}}}},
    ),
    "echo": ("ingero-echo", {"persistence": {"storageClass": "encrypted"}}),
    "echo-all": (
        "ingero-echo",
        {
            **SWITCHES,
            "persistence": {"encryptionAcknowledged": True, "size": "5Gi"},
            "tls": {"secretName": "echo-tls"},
            "auth": {"aclKey": "bearers.yaml"},
            "serviceMonitor": {"enabled": True, "tokenSecret": {"name": "of-prometheus"}},
            "backups": {"existingClaim": "echo-backups"},
            "config": {"retention": "168h", "backup_keep": 3},
        },
    ),
    "agent": ("ingero", {}),
    "agent-configured": (
        "ingero",
        {
            "config": {"agent": {"node": "ignored"}, "trace": {"prometheus": "", "stack": True}},
            "kubelet": {"ask": False},
            "ncclPlugin": {"hostPath": "/opt/ingero"},
            "podAnnotations": {"a": "b"},
        },
    ),
    "agent-capabilities": ("ingero", {"privileged": False, "namespace": {"create": True}}),
    "agent-push": (
        "ingero",
        {
            "mode": "fleet-push",
            "podMonitor": {"enabled": True},
            "fleetPush": {
                "endpoint": "fleet:4318",
                "clusterID": "prod",
                "stub": True,
                "thresholdUrl": "http://fleet:8080",
                "tokenSecret": {"name": "push"},
                "remediation": {"sinkEnabled": True},
            },
        },
    ),
    "agent-trace-tls": (
        "ingero",
        {"fleetPush": {"tls": {"secretName": "agent-tls"}, "tokenSecret": {"name": "push"}}},
    ),
    "agent-tls": (
        "ingero",
        {
            "mode": "fleet-push",
            "fleetPush": {
                "endpoint": "https://f:4318",
                "clusterID": "c",
                "tls": {"secretName": "t"},
            },
        },
    ),
}


def objects_of(case):
    chart, values = CASES[case]
    return render(chart, **values)
