"""Helpers, one subject each."""
