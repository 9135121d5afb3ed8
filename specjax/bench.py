"""`python -m specjax.bench`: see `specjax.apps.run.bench`."""

from specjax.apps.command_line import command
from specjax.apps.run.bench import main

if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
