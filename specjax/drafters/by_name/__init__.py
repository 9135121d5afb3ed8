"""Drafters by name: the registry, their options, what makes one, and vLLM's config."""
