"""Loads what a run would load, each part in a process of its own, and says what it saw."""
