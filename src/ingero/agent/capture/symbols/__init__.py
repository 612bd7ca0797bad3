"""Which functions are probed and what their arguments mean, as tables.

Above `kernel`: turns a table row into the descriptor that the engine's one program reads. It attaches nothing and reads
no process.
"""
