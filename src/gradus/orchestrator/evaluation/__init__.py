"""Evaluations: in an RL run, beside a supervised run, and alone."""
