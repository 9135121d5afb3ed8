"""Training of mixtures of experts: expert loads, and load balancing."""
