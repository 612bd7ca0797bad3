"""``python -m ingero`` is ``ingero``."""

from ingero.cli.entry_points import run_ingero

if __name__ == "__main__":
    run_ingero()
