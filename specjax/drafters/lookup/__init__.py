"""Drafters that copy tokens from the row's text or from the target's earlier predictions."""
