"""The alerter: local straggler events to people, one incident per episode, resolved when it ends.

`config` is what a user writes, `episodes` decides what becomes an alert, `backends` builds each receiver's request,
`delivery` sends it. It reads the agent's socket and opens nothing but connections to the receivers.
"""
