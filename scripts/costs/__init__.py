"""What rounds, drafts and memory cost, measured or simulated."""
