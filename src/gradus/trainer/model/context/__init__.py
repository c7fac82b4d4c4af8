"""Ranks that share the tokens of a micro batch."""
