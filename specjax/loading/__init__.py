"""Models, heads and tokenizers: loaded, saved, found by name."""
