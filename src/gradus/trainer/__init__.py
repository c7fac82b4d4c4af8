"""Learns from batches, whether the orchestrator, conversations or a benchmark makes them."""
