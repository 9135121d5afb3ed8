"""Meshes of devices, runs with several processes, locks of folders, and device memory."""
