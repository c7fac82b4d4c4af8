"""Batches one way, events back."""
