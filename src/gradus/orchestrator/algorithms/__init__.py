"""Rewards become advantages and loss weights."""
