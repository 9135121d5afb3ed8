"""`python -m specjax.doctor`: see `specjax.apps.doctor.doctor`."""

from specjax.apps.command_line import command
from specjax.apps.doctor.doctor import main

if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
