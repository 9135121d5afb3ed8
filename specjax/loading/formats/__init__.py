"""Model files: GGUF and Hugging Face's layout."""
