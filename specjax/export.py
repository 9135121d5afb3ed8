"""`python -m specjax.export`: see `specjax.apps.export`."""

from specjax.apps.command_line import command
from specjax.apps.export import main

if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
