"""Plays, scores, batches."""
