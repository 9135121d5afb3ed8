"""Loading and saving of models, trained heads and tokenizers."""
