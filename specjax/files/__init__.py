"""Reading and writing of users' files: paths, JSON, atomic writes, folders with checksums."""
