"""Models trained from text alone: the corpus, its tokenizer, a new model."""
