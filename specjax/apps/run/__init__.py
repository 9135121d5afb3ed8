"""Decode prompts, and measure drafters: the commands decode and bench."""
