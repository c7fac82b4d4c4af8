"""Reverse a text."""
