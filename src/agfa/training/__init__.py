"""Turning a configuration into a run folder."""
