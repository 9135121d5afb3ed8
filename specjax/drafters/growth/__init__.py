"""Growing drafts from a drafter's logits: chains, and token trees level by level."""
