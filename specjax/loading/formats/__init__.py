"""Model formats: GGUF files and Hugging Face directories."""
