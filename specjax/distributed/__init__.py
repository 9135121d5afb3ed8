"""Meshes of devices, runs over several processes, folder locks, device memory."""
