"""Serve a model over HTTP, with OpenAI's API for completions and chats.

    python -m specjax.serve --config.drafter.name=ngram --config.port=8000

The programs of an engine are compiled and run once; then "ready" is printed with the URL, which the
package `openai` takes as `base_url`. docs/serving.md lists the fields of requests.

Ctrl-C or SIGTERM ends the server when the running requests have finished, or aborts them after
`shutdown_s` seconds; a second signal aborts them at once.

Exit codes: 0 after Ctrl-C, SIGTERM or a closed terminal; 2 for bad input; 130 if interrupted before
the server is ready.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

from rich.console import Console

from specjax.apps.command_line import command
from specjax.apps.command_line.console import Screen
from specjax.apps.command_line.mesh_config import ONE_PROCESS, open_mesh
from specjax.apps.rows.decode_report import device_name
from specjax.apps.run.decode_config import load_target, make_config_drafter
from specjax.apps.serve.serve_config import ServeConfig, read_serve_config
from specjax.engine.engine import Engine
from specjax.engine.plan import plan_engine
from specjax.errors import InputError

try:
    from specjax.apps.serve.engine_thread import warm_up
    from specjax.apps.serve.server import Server, bind, url_of
except ModuleNotFoundError as error:
    if error.name not in ("anyio", "starlette", "uvicorn"):
        raise
    missing: str | None = error.name
else:
    missing = None

CONFIG = "serve_smollm2"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return command.run_config(
        serve,
        argv,
        default=CONFIG,
        read=read_serve_config,
        documentation=__doc__,
        source=ServeConfig,
    )


def serve(config: ServeConfig) -> int:
    """Serve the model of a config until a signal arrives, and return the command's exit code.

    Raises InputError.
    """
    if missing is not None:
        raise InputError(f"serve: {missing} is not installed; pip install 'specjax[serve]'")
    listener = bind(config.host, config.port)
    screen = Screen(Console(width=None if sys.stdout.isatty() else 100))
    mesh = open_mesh(config.mesh, ONE_PROCESS, config.written)
    with screen.working(f"loading {config.target}"):
        model = load_target(config, mesh)
        (drafter,) = config.drafters
        made = make_config_drafter(config, drafter, model, tell=screen.say)
        engine = Engine.of(plan_engine(model, made.loaded, config.options))
    screen.say(f"{model.num_params / 1e6:.1f}M parameters, {model.weights}, on {device_name(mesh)}")
    slots = engine.plan.options.batch_size
    with screen.working(f"compiling {drafter.name} for up to {slots} samples at once"):
        warm_up(engine, config.sampling)
    line = f"ready: {url_of(listener)}/v1 serves {config.model_name}"
    ready = functools.partial(screen.say, line)
    Server(engine, config, listener, api_key=config.api_key, ready=ready).serve_until_stopped()
    screen.say("stopped")
    return 0


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
