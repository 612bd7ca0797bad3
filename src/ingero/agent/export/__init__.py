"""What leaves a node for others' tools: events as Prometheus metrics and pages, recordings as traces, several as one.

Above the store; beside the questions and the health loop, which it knows only by the lines on its socket. Reads
recordings read-only, writes only the file it was told to write, and sends nothing anywhere by itself.
"""
