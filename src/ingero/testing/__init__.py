"""Fakes and builders for tests, here and in the projects of those who build on us. Nothing in src imports it."""
