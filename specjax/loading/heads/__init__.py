"""Trained heads: the class, saved and read, and its parameters with those of its target."""
