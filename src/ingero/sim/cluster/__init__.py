"""A whole cluster on one machine: hosts, a simulated job, real agents, a real Fleet, and what it says.

Above the three programs, as a command may be; it starts them as processes and asks them as a user would. It tells
verdicts, it makes none.
"""
