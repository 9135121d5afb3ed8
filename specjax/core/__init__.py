"""The speculative step: drafters' contract, draft growth, cache, round, verification and loop."""
