"""What the page behind a proposal's link says, as HTML without scripts. Pure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape
from typing import Any, Final
from urllib.parse import urlsplit

from ingero.remediation.config import ActuatorConfig
from ingero.remediation.kubernetes_config import KubernetesConfig
from ingero.remediation.records import HOLDING, ActionRecord, ActionState
from ingero.units import NS_PER_S, format_duration

_STYLE: Final = """
:root { color-scheme: light dark; font: 1.05rem/1.5 system-ui, sans-serif; }
body { margin: 0; } main { max-width: 42rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .4rem 1rem; margin: 1rem 0; }
dt { font-weight: 600; } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 30rem) { dl { display: block; } dd { margin: 0 0 .6rem; } }
.answers { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.5rem 0; }
button { font: inherit; font-weight: 600; flex: 1 1 12rem; min-height: 3rem; padding: .6rem 1rem; cursor: pointer;
  border: 2px solid; border-radius: .4rem; background: Canvas; color: CanvasText; overflow-wrap: anywhere; }
button.approve { background: #0b5cad; border-color: #0b5cad; color: #fff; }
button:focus-visible, summary:focus-visible { outline: 3px solid #d97706; outline-offset: 2px; }
summary { cursor: pointer; padding: .5rem 0; } li { margin: .3rem 0; overflow-wrap: anywhere; }
"""
STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
"""Of the page's own style, for its Content-Security-Policy."""
_BECAME: Final = {
    ActionState.APPROVED: "approved: it is done at the next poll, if the policy still allows it",
    ActionState.REJECTED: "rejected: the node is left alone",
    ActionState.EXPIRED: "over: nobody answered in time, or the finding ended",
    ActionState.BEGUN: "approved, and being done",
    ActionState.DONE: "approved and done",
}


def write_proposal(record: ActionRecord, effect: str, label: str, until_ns: int) -> str:
    """What would be done and why, and two buttons.

    Args:
        record: The proposal.
        effect: What the action does, in a sentence.
        label: Who answers.
        until_ns: Until when it waits, since the epoch.
    """
    target = escape(record.target)
    return write_page(
        f"Take {record.target} out of service?",
        f"""<p>{escape(effect)}</p>
{_write_facts(record)}
<form method="post"><div class="answers">
<button class="approve" name="answer" value="approve">Approve: take {target} out</button>
<button class="reject" name="answer" value="reject">Reject: leave {target} alone</button>
</div></form>
<p>You answer as <strong>{escape(label)}</strong>, once; the journal keeps that. An approved action is done at the
next poll if the policy still allows it. Without an answer the proposal is over at {_time(until_ns)}.</p>
{_write_clauses(record.clauses)}""",
    )


def describe_effect(action: ActuatorConfig, target: str) -> str:
    """What an action does, in a sentence for one who has not read the policy."""
    if action.slurm is not None:
        requeued = "its jobs that allow it are requeued and lose what was not checkpointed."
        jobs = requeued if action.slurm.requeue else "jobs that run there go on."
        return f"Slurm drains {target}: it gets no new jobs, and {jobs}"
    if action.kubernetes is not None:
        return _describe_node(action.kubernetes, target)
    if action.kubernetes_device is not None:
        description = {
            "None": "Nothing happens to pods; Kubernetes only says how many would be deleted.",
            "NoSchedule": "No new pod gets it; pods that use it go on.",
            "NoExecute": "No new pod gets it, and pods that use it and do not tolerate that are deleted.",
        }
        return (
            f"Kubernetes taints the device {target}. {description[action.kubernetes_device.effect]}"
        )
    if action.nvsentinel is not None:
        stored = "NVSentinel keeps it and does nothing."
        rules = "NVSentinel does what its rules say, which may be a drain and a repair."
        is_stored = action.nvsentinel.strategy == "store-only"
        return f"NVSentinel is told that {target} is not healthy. {stored if is_stored else rules}"
    if action.command is not None:
        return f"The site's own command {action.command.drain[0]} takes {target} out of service."
    assert action.webhook is not None
    host = urlsplit(action.webhook.url).hostname
    return f"The webhook at {host} is asked to take {target} out of service."


def _describe_node(config: KubernetesConfig, target: str) -> str:
    done = [
        f"a taint {config.taint_key}:{config.taint}" if config.taint else "",
        "a cordon" if config.cordon else "",
        f"a condition {config.condition}" if config.condition else "",
    ]
    evicted = "Pods that do not tolerate the taint are evicted."
    description = evicted if config.taint == "NoExecute" else "Pods that run there go on."
    return f"Kubernetes' node {target} gets {', '.join(one for one in done if one)}. {description}"


def _write_facts(record: ActionRecord) -> str:
    evidence = record.evidence
    rank, lost_s = evidence.get("rank", -1), evidence.get("lost_gpu_s", 0)
    facts = [
        ("Why", f"{evidence.get('verdict', '')}: {evidence.get('reason', '')}"),
        ("Cluster", record.cluster_id),
        ("Node", record.node_id),
        ("Rank", f"{rank}" if rank >= 0 else "unknown"),
        ("Job", evidence.get("job", "")),
        ("Evidence", f"10^{evidence.get('evidence_log10', 0):.1f} that it is slower than its peers"),
        ("Compared with", f"{evidence.get('peers', 0)} ranks, itself included"),
        ("Lost so far", f"{format_duration(int(lost_s * NS_PER_S))} of GPU time"),
        ("Who waited", ", ".join(evidence.get("victims", ())) or "nobody yet"),
        ("Proposed", _time(record.changed.wall_ns)),
        ("Action", f"{record.action_id} for finding {record.episode}"),
    ]  # fmt: skip
    rows = (
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts if value
    )
    return f"<dl>{''.join(rows)}</dl>"


def _write_clauses(clauses: Iterable[Mapping[str, Any]]) -> str:
    items = "".join(
        f"<li><strong>{escape(one['clause'])}</strong>: {escape(one['says'])}</li>"
        for one in clauses
    )
    return f"<details><summary>What the policy compared</summary><ul>{items}</ul></details>"


def write_answered(record: ActionRecord, changes: Iterable[Mapping[str, Any]]) -> str:
    """What became of a proposal that was answered, or that is over."""
    outcome = _BECAME.get(record.state, record.state.value)
    items = "".join(
        f"<li>{_time(one['unix_ns'])}: <strong>{escape(one['state'])}</strong> {escape(one['note'])}</li>"
        for one in changes
    )
    target, action = escape(record.target), escape(record.action_id)
    is_out = record.state in HOLDING
    undo = f" <code>ingero-remediator undo {action}</code> gives it back." if is_out else ""
    return write_page(
        f"{record.target}: {record.state.value}",
        f"<p>The proposal to take {target} out of service is {outcome}. This link takes no other answer.{undo}</p>"
        f"<h2>What became of it</h2><ul>{items}</ul>",
    )


def write_page(title: str, content: str) -> str:
    """A whole page; the title is text, the content is HTML."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)} – Ingero</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>
<body><main><h1>{escape(title)}</h1>
{content}
</main></body></html>
"""


def _time(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns // NS_PER_S, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
