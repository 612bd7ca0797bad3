"""Questions about a recording: each defined once, asked by the CLI, over HTTP and over MCP.

Above the store and the causal engine, below the program. Refuses to write: every question opens the file read-only.
"""
