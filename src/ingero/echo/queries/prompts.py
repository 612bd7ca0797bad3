"""Recipes for assistants: `PROMPTS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ingero.serving.query import Prompt, PromptArgument

_STEPS: Final = """Find out which node{cluster} slows the job down, whom it makes wait, and what that costs. Use the \
last {window}. Every answer says its window and coverage: no rows with no coverage means unknown, not healthy; if the \
window is empty, ask again with until="latest".

1. fleet.cluster.summary{args}: how many nodes report, their scores, open incidents. Note coverage.
2. fleet.cluster.find_stragglers{args}. A `verdict` of culprit or network outranks any score. If there is none, call \
fleet.cluster.find_outlier_nodes and fleet.cluster.collective_skew: when every rank of a stage is slow together, or \
the slow one rotates, it is imbalance and no node is at fault; say so and stop.
3. fleet.cluster.blame_chain{args}: the last to arrive spends the *shortest* time in a collective. Long waiting names \
victims. If nothing moves at all, fleet.cluster.hangs names who never arrived.
4. fleet.cluster.cost_by_culprit{args}: GPU-seconds and money, and what stays unattributed.
5. State the WHERE: the node id (and rank), since when, how sure (verdict, margins), whom it blocked, the cost.
6. The WHY is on that node: ask its own agent (`ingero mcp` there: get_check, get_causal_chains, get_stacks, \
get_trace_stats). Do not guess a cause from cluster data alone."""


def _investigate(arguments: Mapping[str, str]) -> str:
    cluster = arguments.get("cluster_id", "")
    window = arguments.get("time_window") or "1h"
    args = (
        f'(cluster_id="{cluster}", time_window="{window}")'
        if cluster
        else f'(time_window="{window}")'
    )
    return _STEPS.format(
        cluster=f" of cluster {cluster}" if cluster else "", window=window, args=args
    )


PROMPTS: Final = (
    Prompt(
        "investigate",
        "Walk from the cluster's WHERE to the node's WHY: summary, stragglers or imbalance, blame, cost, hand-off.",
        (
            PromptArgument("cluster_id", "The cluster; empty for all that you may read."),
            PromptArgument("time_window", "How far back, such as 1h."),
        ),
        _investigate,
    ),
)
