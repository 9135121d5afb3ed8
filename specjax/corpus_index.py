"""`python -m specjax.corpus_index`: see `specjax.apps.corpus_index`."""

from specjax.apps.command_line import command
from specjax.apps.corpus_index import main

if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
