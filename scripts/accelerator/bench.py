"""The measuring process: cells in order, each a row as soon as it is measured."""

from __future__ import annotations

import gc
import os
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from accelerator.jobs import FORMS, Job, Workbench
from accelerator.rows import FAILED, MEASURED, NO_FIT, NO_MEMORY, SKIPPED, Cell, Rows, describe
from accelerator.sizes import SIZES, Size
from specjax.cli import command
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Form

_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class Options:
    """Options of the measuring process; `deadline` is in seconds since the epoch."""

    out: Path
    size: str
    models: tuple[str, ...]
    kinds: tuple[str, ...]
    deadline: float
    memory_bytes: int | None
    label: str
    form: str | None
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    retry_failed: bool

    def wants(self, cell: Cell) -> bool:
        """Whether a cell was requested; the device is measured in any case."""
        if cell["kind"] == "device":
            return True
        return (
            cell["kind"] in self.kinds
            and cell["batch"] in self.batches
            and cell["context"] in self.contexts
        )


@dataclass(frozen=True)
class Result:
    """The result of the measuring process: settings, device, each model's layers, cells left."""

    settings: dict[str, Any]
    platform: str
    memory_bytes: int | None
    layers: dict[str, int]
    left: tuple[str, ...]


def measure(options: Options) -> Result:
    """Measure what is left, in a process that holds the device's memory until it ends."""
    # The default leaves a quarter of the memory unused.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
    command.use_compilation_cache()
    bench = Bench(options)
    jax.monitoring.register_event_duration_secs_listener(bench.compiled)
    return bench.run()


class Bench:
    """The jobs of a size on the default device."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.size: Size = SIZES[options.size]
        device = jax.local_devices()[0]
        stats = device.memory_stats() or {}
        self.memory_bytes = options.memory_bytes or stats.get("bytes_limit")
        backend = jax.default_backend()
        self.platform = "gpu" if backend in ("cuda", "rocm") else backend
        own = Form.of(self.platform, self.size.models[options.models[0]])
        self.form = FORMS[options.form] if options.form else own
        self.settings = {
            "size": options.size,
            "label": options.label,
            "device": device.device_kind,
            "jax": jax.__version__,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "form": f"{self.form.layers}_{self.form.cache_attention}",
            "dtype": self.size.dtype,
            "num_speculative_tokens": self.size.num_speculative_tokens,
            "rounds": self.size.rounds,
            "runs": self.size.runs,
        }
        self.rows = Rows(options.out, self.settings)
        self.configs = {name: self._fitted(name) for name in options.models}
        self.work = Workbench(
            self.size, self.configs, self.platform, self.form, self.memory_bytes, self.rows
        )
        self._compile_s = 0.0
        self._broken = False

    def run(self) -> Result:
        """Measure job after job, until all is done or the time is over."""
        jobs = [job for job in self.work.jobs() if self.options.wants(job.cells[0])]
        total = sum(len(job.cells) for job in jobs)
        retry = self.options.retry_failed
        left = [[cell for cell in job.cells if not self.rows.done(cell, retry)] for job in jobs]
        count = sum(map(len, left))
        layers = {name: config.num_layers for name, config in self.configs.items()}
        print(f"{self.settings['device']}: {count} of {total} cells to measure", flush=True)
        for name in self.configs:
            if layers[name] < self.size.models[name].num_layers:
                full = self.size.models[name].num_layers
                print(f"{name}: {layers[name]} of {full} layers fit", flush=True)
        begin, tried, remaining = time.time(), 0, count
        over: list[str] = []
        for job, cells in zip(jobs, left, strict=True):
            if not cells:
                continue
            if self._broken or time.time() >= self.options.deadline:
                over += map(describe, cells)
                continue
            eta = ""
            if tried:
                minutes = (time.time() - begin) / tried * remaining / 60
                eta = f", about {minutes:.0f} min left" if minutes >= 1 else ", under a minute left"
            print(f"[{total - remaining + 1}/{total}] {_together(cells)}{eta}", flush=True)
            tried += self._measure(job, cells)
            remaining -= len(cells)
        return Result(self.settings, self.platform, self.memory_bytes, layers, tuple(over))

    def compiled(self, event: str, seconds: float, **_: Any) -> None:
        """Called with JAX's events: adds up the seconds of compiling, and prints them."""
        if event == _COMPILED:
            self._compile_s += seconds
            if seconds >= 1:
                print(f"    compiled in {seconds:.1f} s", flush=True)

    def _measure(self, job: Job, cells: list[Cell]) -> int:
        """Add a row for each cell, with figures or the reason for none; returns how many ran."""
        limit = self.memory_bytes
        if limit is not None and job.needed_bytes > limit:
            needed = {"needed_bytes": job.needed_bytes, "memory_bytes": limit}
            reason = f"does not fit: needs {_gib(job.needed_bytes)} of {_gib(limit)}"
            self._add(cells, NO_FIT, reason=reason, **needed)
            return 0
        begin, self._compile_s = time.time(), 0.0
        waiting = list(cells)
        try:
            self.work.prepare(job)
            for cell, values in job.run(cells):
                spent = {"spent_s": time.time() - begin, "compile_s": self._compile_s}
                self._add([cell], MEASURED, **values, **spent)
                waiting.remove(cell)
                begin, self._compile_s = time.time(), 0.0
        # An error of a kernel or a compiler ends its own cell, not the run.
        except Exception as error:
            self._fail(waiting, error)
        gc.collect()
        return len(cells)

    def _fail(self, cells: list[Cell], error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if "RESOURCE_EXHAUSTED" in str(error):
            return self._add(cells, NO_MEMORY, reason=reason)
        if isinstance(error, NotImplementedError):
            return self._add(cells, SKIPPED, reason=reason)
        traceback.print_exc()
        self._add(cells, FAILED, reason=reason)
        if cells[0]["kind"] == "device":
            # All other rows refer to it.
            self._broken = True
        try:
            jax.block_until_ready(jax.jit(lambda x: x + 1)(0))
        except jax.errors.JaxRuntimeError:
            # After an illegal access nothing runs on a GPU until the process has ended.
            self._broken = True
            print("    the device has failed: run the same command again", flush=True)

    def _add(self, cells: list[Cell], status: str, **values: Any) -> None:
        for cell in cells:
            self.rows.add(cell, status, date=time.strftime("%Y-%m-%d"), **values)
        print(f"    {_headline(status, values)}", flush=True)

    def _fitted(self, name: str) -> DecoderConfig:
        config, limit = self.size.models[name], self.memory_bytes
        if name not in self.size.fewer_layers or limit is None:
            return config
        # Where not even one layer fits, every cell says so.
        layers = self.size.fitting_layers(config, limit) or config.num_layers
        return replace(config, num_layers=layers)


def _together(cells: list[Cell]) -> str:
    more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
    return f"{describe(cells[0])}{more}: compiling and measuring"


def _headline(status: str, values: dict[str, Any]) -> str:
    if status != MEASURED:
        reason = values["reason"]
        return reason if reason.startswith(status) else f"{status}: {reason}"
    words = []
    for name, text in (
        ("copy_bandwidth", "copies {:.4g} bytes/s"),
        ("matmul_flops", "multiplies {:.4g} FLOP/s"),
        ("measured_acceptance", "acceptance {:.2f}"),
        ("speedup", "speed-up {:.2f}x"),
        ("predicted", "predicted {:.2f}x"),
        ("round_s", "{:.3g} s per round"),
        ("seconds", "{:.3g} s"),
        ("relative", "{:.2f} T(1)"),
        ("bandwidth_utilisation", "{:.0%} of copy bandwidth"),
        ("loop_overhead", "loop overhead {:.1%}"),
    ):
        if name in values:
            words.append(text.format(values[name]))
    return ", ".join(words)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
