"""Training from text alone: the corpus, its tokenizer, a new model."""
