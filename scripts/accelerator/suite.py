"""Run tests whose results depend on the device: rules, thresholds of sampling, kernels.

    python scripts/accelerator/suite.py [debug]

`debug` runs a few of them, as on a CPU. Prints "not installed" if a package that the tests need is
missing.
"""

from __future__ import annotations

import importlib.util
import os
import sys

_NEEDED = ("pytest", "beartype", "hypothesis", "scipy")
_KERNELS = (
    "tests/test_experts.py::test_the_gpu_kernel_has_the_sum_of_the_loop",
    "tests/test_forms.py::test_all_ways_agree_with_the_loop_over_blocks",
)
_RULES = ("tests/test_warp.py", "tests/test_verify_chain.py", "tests/test_verify_tree.py")


def main() -> int:
    """Run the tests; return pytest's exit code."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}")
        return 0
    chosen = _KERNELS[:1] if "debug" in sys.argv[1:] else (*_KERNELS, *_RULES)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)
    os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(main())
