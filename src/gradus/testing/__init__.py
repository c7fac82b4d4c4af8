"""Fakes and builders for fast tests, shipped with the package."""
