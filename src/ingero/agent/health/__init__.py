"""The node's health loop: signals in, a score out, a threshold back, an episode when the node falls under it.

Above the store and the causal engine, beside queries and export. Score, baseline, machine, mode and classifier are
plain arithmetic and take time as data; `loop` composes them, `push` and `poll` talk to Fleet, `remediate` talks to
local readers. Nothing here acts on the node: it names, and hands over.

Behaviour is specified in ``docs/specs/agent-health.md``; numbers in brackets, such as [H12], refer to it.
"""
