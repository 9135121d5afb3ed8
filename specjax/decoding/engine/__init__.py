"""The engine: requests that arrive at any time share a fixed number of slots."""
