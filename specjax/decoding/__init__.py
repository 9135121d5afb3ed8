"""Decoding: planning and compiling a call, the engine, and the loop over rounds."""
