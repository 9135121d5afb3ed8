"""Loading and saving of models, heads and tokenizers."""
