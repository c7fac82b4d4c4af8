"""Faults for a run, on purpose, and what must hold after each of them."""
