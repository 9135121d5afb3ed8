"""`python -m specjax.report`: see `specjax.apps.report.report`."""

from specjax.apps.command_line import command
from specjax.apps.report.report import main

if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
