"""The file that `ingero trace` writes, and everything that reads one: no root, no GPU, no kernel.

Below the agent, which writes recordings through `ingero.recording.store`; blind to it, to Fleet and to Echo.
"""
