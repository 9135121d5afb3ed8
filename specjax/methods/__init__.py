"""Drafting methods, one file or folder each, by name and with their options."""
