"""Applications on the library, which imports none of them."""
