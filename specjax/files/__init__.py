"""Read and write users' files: paths, JSON, atomic writes, owned folders."""
