"""One module per verb; the verbs are listed in `ingero.cli.main.COMMANDS`."""
