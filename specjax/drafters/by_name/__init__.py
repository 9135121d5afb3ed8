"""Drafters by name: their registry, options and construction, and vLLM's config."""
