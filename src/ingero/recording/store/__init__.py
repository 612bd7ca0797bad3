"""The recording on disk: SQLite, one writer, readers that cannot write.

Sits beside ``recording.causal`` and knows nothing of it: rows become `ingero.model.recording.Recording` and back. It
never migrates a file, never creates one to read it, and never decides what a row means.
"""
