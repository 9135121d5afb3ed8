"""P-EAGLE: EAGLE-3 that drafts all tokens in one pass."""
