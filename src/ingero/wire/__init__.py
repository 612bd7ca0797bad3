"""Bytes between programs: names, headers, OTLP, collective batches, local-socket messages."""
