"""Language models: the decoder, its loaders, its tokenizer."""
