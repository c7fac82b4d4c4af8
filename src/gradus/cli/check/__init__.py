"""Loads what a run would load, each part in a separate process, and says what it saw."""
