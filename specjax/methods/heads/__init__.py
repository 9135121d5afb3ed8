"""Trained heads: their files, published layouts, and what their drafters share."""
