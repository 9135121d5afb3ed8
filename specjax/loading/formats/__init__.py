"""Formats of models: GGUF files and Hugging Face directories."""
