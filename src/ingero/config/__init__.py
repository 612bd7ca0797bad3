"""The only reader of YAML and of the environment."""
