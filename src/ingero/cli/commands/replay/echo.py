"""An Echo of one's own beside the replay's Fleet.

What was pushed is kept, and asked for at the end over HTTP and MCP.
"""

from __future__ import annotations

import time
from typing import Any, Final

import httpx

from ingero.cli.render import plural
from ingero.sim.local_echo import LocalEcho
from ingero.web_authorities import WebAuthorities

_SETTLE_S: Final = 20.0
_SAME: Final = 0.001
_POLL_S: Final = 0.2
_TOOLS: Final = ("find_stragglers", "blame_chain", "cost", "cost_by_culprit")


def ask_echo(echo: LocalEcho, cluster_id: str, charged_gpu_s: float) -> dict[str, Any]:
    """What Echo says of the replay's cluster, once what Fleet forwarded has settled.

    Args:
        echo: Who is asked.
        cluster_id: The replay's cluster.
        charged_gpu_s: What Fleet charges its culprits with in the end; Echo gets some seconds to receive it.

    Returns:
        Answers by tool; ``mcp_agrees``: MCP gave the same; ``cost_agrees``: the cost is what Fleet charged.
    """
    arguments = {"cluster_id": cluster_id, "time_window": "1d"}
    headers = {"Authorization": f"Bearer {echo.token}"}
    with httpx.Client(
        base_url=echo.url, headers=headers, timeout=30, verify=WebAuthorities()
    ) as client:

        def ask(tool: str) -> dict[str, Any]:
            answer = client.post(f"/api/v2/tools/fleet.cluster.{tool}", json={"args": arguments})
            answer.raise_for_status()
            result: dict[str, Any] = answer.json()["result"]
            return result

        def has_settled() -> bool:
            cost = ask("cost_by_culprit")
            if cost["coverage"]["source"] != "costs":
                return False  # what Fleet's gauge says, which has no money and nothing that is charged to nobody
            charged_s = sum(row["gpu_seconds"] for row in cost["rows"])
            return bool(abs(charged_s - charged_gpu_s) <= _SAME * charged_gpu_s)

        deadline_s = time.monotonic() + _SETTLE_S
        while charged_gpu_s and time.monotonic() < deadline_s and not has_settled():
            time.sleep(_POLL_S)
        answers = {tool: ask(tool)["rows"] for tool in _TOOLS}
        over_mcp = _call_mcp(client, "fleet.cluster.blame_chain", arguments)
    held_gpu_s = sum(row["gpu_seconds"] for row in answers["cost_by_culprit"])
    return {
        **answers,
        "mcp_agrees": over_mcp == answers["blame_chain"],
        "cost_agrees": abs(held_gpu_s - charged_gpu_s) <= _SAME * charged_gpu_s,
    }


def _call_mcp(client: httpx.Client, tool: str, arguments: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """One stateless call. Source: MCP 2025-06-18, streamable HTTP."""
    call = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": tool, "arguments": arguments},
    }
    headers = {
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": "2025-06-18",
    }
    answer = client.post("/mcp", json=call, headers=headers)
    answer.raise_for_status()
    return answer.json()["result"]["structuredContent"]["rows"]


def _describe_cost(row: dict[str, Any]) -> str:
    line = f"{row['gpu_seconds'] / 3600:.3g} GPU-hours"
    return line if row["amount"] is None else f"{line}, {row['amount']:.2f} {row['currency']}"


def describe_echo(answers: dict[str, Any]) -> list[str]:
    """The answers in lines for a person."""
    lines = [
        f"{row['node_id']} is judged {row['verdict']}"
        for row in answers["find_stragglers"]
        if row["verdict"] is not None
    ]
    victims = [row for row in answers["blame_chain"] if row["source"] == "costs" and row["victim"]]
    if victims:
        most = [
            f"{row['victim']} ({row['waited_gpu_s'] / 3600:.3g} GPU-hours)" for row in victims[:3]
        ]
        lines.append(f"it made {plural(len(victims), 'node')} wait, most {', '.join(most)}")
    lines += [f"{row['node_id']} cost {_describe_cost(row)}" for row in answers["cost_by_culprit"]]
    total = [row for row in answers["cost"] if row["gpu_seconds"]]
    lines += [f"all waiting cost {_describe_cost(row)}" for row in total]
    if not answers["cost_agrees"]:
        lines.append("the cost differs from what Fleet charged: records are missing or late")
    lines.append(
        "MCP gives the same answer" if answers["mcp_agrees"] else "MCP gives another answer"
    )
    return lines
