"""The parts of `scripts/bench_accelerator.py` and `scripts/check_accelerator.py`."""
