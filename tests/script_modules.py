"""The commands in `scripts/` as modules."""

import contextlib
import importlib
import sys
from pathlib import Path

from absl import flags

SCRIPTS = Path(__file__).parent.parent / "scripts"


@contextlib.contextmanager
def script_module(name):
    """A script beside which others can be imported, all of them forgotten afterwards."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))
        for other, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file and Path(file).is_relative_to(SCRIPTS):
                del sys.modules[other]
                for flag in flags.FLAGS.flags_by_module_dict().get(other, ()):
                    if flag.name in flags.FLAGS:  # another module may have had one of that name
                        delattr(flags.FLAGS, flag.name)
