"""The engine, in which requests that arrive at any time share a fixed number of slots."""
