"""Decoding: planning a call, compiling and stepping it, the loop over rounds and its parts."""
