"""The commands people type. Parsing, orchestration and rendering; no domain logic."""
