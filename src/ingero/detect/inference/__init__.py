"""Steps of programs that serve a model: found in their calls, distinguished by phase, compared with their own past."""
