"""Training of drafters on data that their target wrote, and of new models.

Training needs the packages of the extra `train`. A command that is started without one of them ends
with exit code 2 and a line that says how to install them.
"""

import importlib.util
import sys

_PACKAGES = ("optax", "tensorflow_datasets", "array_record", "importlib_resources", "tensorboardX")


def _check_packages() -> None:
    """End a command, `python -m train.NAME` or `specjax train.NAME`, if a package is missing.

    Programs that import this package, such as the list of commands, continue.
    """
    # Python sets "-m" while it looks for the module, and `specjax.__main__` the command.
    if sys.argv[0] != "-m" and not sys.argv[0].startswith("train."):
        return
    missing = next((name for name in _PACKAGES if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        print(
            f"error: train: {missing} is not installed; pip install 'specjax[train]'",
            file=sys.stderr,
        )
        raise SystemExit(2)


_check_packages()
