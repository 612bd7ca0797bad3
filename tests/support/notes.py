"""Notes of a trace, which sees the processes of all tests that run meanwhile."""


def without_others(notes, folder):
    """Those that name no file of another test; ``folder`` is that of this one."""
    return [note for note in notes if "/pytest-of-" not in note or str(folder) in note]
