"""Drafts of a smaller language model."""
