"""Plays, scores, batches."""

from gradus.deferred import defer_imports

# Before any module below imports verifiers.
defer_imports()
