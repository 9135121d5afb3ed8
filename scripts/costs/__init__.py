"""Costs of compiling and of controllers, measured or simulated."""
