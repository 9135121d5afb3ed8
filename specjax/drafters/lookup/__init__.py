"""Drafters that copy: from the tokens of a row, or from what the target said of them before."""
