"""Drafters with heads that were trained for one target."""
