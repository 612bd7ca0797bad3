"""Finding the files to probe and saying who a process is: its libraries, its rank, its job, its container.

Beside `symbols`, above `kernel`. Reads ``/proc`` and ELF files; never executes or maps what a target names.
"""
