"""Harnesses that play inside a worker, their model calls, and the tool servers they use."""
