"""The node's health loop: signals in, a score out, a threshold back, an episode when the node falls under it.

Score, baseline, state machine, threshold choice and classifier are plain arithmetic and take time as data; `loop`
composes them, `push_queue` and `poll` talk to Fleet, `ingero.agent.events` serves local readers. Nothing here acts on
the node.

Behaviour is specified in ``docs/specs/agent-health.md``; numbers in brackets, such as [H12], refer to it.
"""
