"""Tries whether a machine and a config can work, and finds why trainer and engine disagree."""
