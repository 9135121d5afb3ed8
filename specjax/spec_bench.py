"""`python -m specjax.spec_bench`: see `specjax.apps.spec_bench`."""

from specjax.apps.command_line import command
from specjax.apps.spec_bench.command import main

if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
