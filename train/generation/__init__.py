"""Prompts for a target, and its answers."""
