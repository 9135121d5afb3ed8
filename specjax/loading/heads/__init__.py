"""Trained heads: the class, finding heads by name or path, and measured rates beside them."""
