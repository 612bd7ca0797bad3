"""The alerter: local straggler events to people, one incident per episode, resolved when it ends.

`config` is what a user writes, `episodes` decides what is worth telling, `backends` says it in each receiver's words,
`delivery` gets it there. It reads the agent's socket and opens nothing but connections to the receivers.
"""
