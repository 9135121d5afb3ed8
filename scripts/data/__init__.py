"""Writers of the goldens in tests/goldens."""
