"""Conversations for supervised fine-tuning, from rows to samples."""
