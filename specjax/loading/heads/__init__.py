"""Trained heads: the class, saved and read."""
