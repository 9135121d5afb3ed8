"""Reading and writing users' files: paths, JSON, atomic writes, folders that specjax owns."""
