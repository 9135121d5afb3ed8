"""`python -m specjax.serve`: see `specjax.apps.serve.serve`."""

from specjax.apps.command_line import command
from specjax.apps.serve.serve import main

if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
