"""Loading and saving models, heads and tokenizers."""
