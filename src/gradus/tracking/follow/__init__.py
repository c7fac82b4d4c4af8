"""Reads the files of a run from a cursor on and keeps every tracker fed."""
