"""How many tokens to draft in a round: fixed, by rows that decode, or what pays."""
