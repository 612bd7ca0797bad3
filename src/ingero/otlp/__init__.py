"""The OpenTelemetry protocol, for all programs.

Below the contracts between our programs (`ingero.wire`), whose builders and readers use it.
"""
