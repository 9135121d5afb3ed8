"""Meshes of devices, jobs of several processes, locks of folders."""
