"""Load and save models, heads and tokenizers."""
