"""`python -m specjax.decode`: see `specjax.apps.run.decode`."""

from specjax.apps.command_line import command
from specjax.apps.run.decode import main

if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
