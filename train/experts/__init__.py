"""Training of mixtures of experts: the load of each expert, and load balancing."""
