"""The public detection benchmark: methods × data sets."""
