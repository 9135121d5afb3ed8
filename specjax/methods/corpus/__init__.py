"""Drafts copied from an index of texts and of finished requests."""
