"""The parts of `scripts/bench_accelerator.py`."""
