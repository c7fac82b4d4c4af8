"""Learns from batches."""
