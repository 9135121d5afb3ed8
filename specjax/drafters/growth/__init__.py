"""How drafts grow: chains, and token trees level by level, of what a drafter says of its tokens."""
