"""`python -m specjax.spec_bench`."""

from specjax.cli import command
from specjax.spec_bench.command import main

if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
