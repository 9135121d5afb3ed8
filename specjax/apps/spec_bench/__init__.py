"""Drafters compared as Spec-Bench does: the command spec_bench."""
