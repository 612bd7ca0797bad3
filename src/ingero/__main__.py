"""``python -m ingero`` is ``ingero``."""

from ingero.cli.main import main

if __name__ == "__main__":
    main()
