"""Generation of answers: prompts for a target, and its answers to them."""
