"""Meshes of devices, runs with several processes, folder locks, device memory."""
