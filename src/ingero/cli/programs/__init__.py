"""The programs beside ``ingero``: Fleet, Echo, the event sink and the alerter."""
