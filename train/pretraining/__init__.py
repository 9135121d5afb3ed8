"""Training from text alone: a corpus, its tokenizer, and a new model."""
