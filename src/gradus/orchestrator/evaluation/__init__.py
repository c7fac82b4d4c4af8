"""Evaluations: inside a run, of a supervised run, and by themselves."""
