"""Shortcuts through libraries of environment workers, each tied to the source it was made for."""
