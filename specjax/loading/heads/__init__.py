"""Trained heads: what one is, and where it is found."""
