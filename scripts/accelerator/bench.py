"""The measuring process: cells in order, each a row as soon as it is measured."""

from __future__ import annotations

import functools
import gc
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from accelerator import decoding, kernels
from accelerator.rows import FAILED, MEASURED, NO_FIT, NO_MEMORY, SKIPPED, Cell, Rows, describe
from accelerator.sizes import ITEMSIZE, SIZES, Size, cached_bytes
from accelerator.synthetic import random_model
from specjax import costs, frontdoor
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Form
from specjax.models.model import Model

FORMS = {
    f"{'stacked' if scan_layers else 'apart'}_{kind}": Form(scan_layers, kind)
    for scan_layers in (True, False)
    for kind in ("blocks", "whole", "kernel")
    if not (scan_layers and kind == "kernel")
}
"""The decoder's forms by name: layers stacked or apart, and how the cache is attended to."""

_COMPILED = "/jax/core/compile/backend_compile_duration"
Measured = Iterator[tuple[Cell, dict[str, Any]]]


@dataclass(frozen=True)
class Options:
    """What the measuring process is told; `deadline` is in seconds since the epoch."""

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
        """Whether a cell was asked for; the device is measured in any case."""
        if cell["kind"] == "device":
            return True
        return (
            cell["kind"] in self.kinds
            and cell["batch"] in self.batches
            and cell["context"] in self.contexts
        )


@dataclass(frozen=True)
class Outcome:
    """What it found out: the rows' settings, the device, each model's layers, cells left."""

    settings: dict[str, Any]
    platform: str
    memory_bytes: int | None
    layers: dict[str, int]
    left: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """Cells that are measured together, the bytes they need, and whether they need a model."""

    cells: list[Cell]
    needed_bytes: int
    run: Callable[[list[Cell]], Measured]
    model: str | None = None


def measure(options: Options) -> Outcome:
    """Measure what is left, in a process that holds the device's memory until it ends."""
    # The default leaves a quarter of the memory unused.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
    frontdoor.use_compilation_cache()
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
        own = Form.of(self.platform)
        self.form = FORMS[options.form] if options.form else own
        self.settings = {
            "size": options.size,
            "label": options.label,
            "device": device.device_kind,
            "jax": jax.__version__,
            "xla_flags": os.environ.get("XLA_FLAGS", ""),
            "form": next(name for name, form in FORMS.items() if form == self.form),
            "dtype": self.size.dtype,
            "num_speculative_tokens": self.size.num_speculative_tokens,
            "rounds": self.size.rounds,
            "runs": self.size.runs,
        }
        self.rows = Rows(options.out, self.settings)
        self.configs = {name: self._fitted(name) for name in options.models}
        self._model: Model | None = None
        self._compile_s = 0.0
        self._broken = False

    def run(self) -> Outcome:
        """Measure job after job, until all is done or the time is over."""
        jobs = [job for job in self.jobs() if self.options.wants(job.cells[0])]
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
        return Outcome(self.settings, self.platform, self.memory_bytes, layers, tuple(over))

    def compiled(self, event: str, seconds: float, **_: Any) -> None:
        """Listens to JAX's events, to count what compiling takes and to say so."""
        if event == _COMPILED:
            self._compile_s += seconds
            if seconds >= 1:
                print(f"    compiled in {seconds:.1f} s", flush=True)

    def _measure(self, job: Job, cells: list[Cell]) -> int:
        """A row for each cell, with figures or with the reason why not; returns those tried."""
        limit = self.memory_bytes
        if limit is not None and job.needed_bytes > limit:
            needed = {"needed_bytes": job.needed_bytes, "memory_bytes": limit}
            reason = f"does not fit: needs {_gib(job.needed_bytes)} of {_gib(limit)}"
            self._add(cells, NO_FIT, reason=reason, **needed)
            return 0
        begin, self._compile_s = time.time(), 0.0
        waiting = list(cells)
        try:
            if job.model != (self._model and self._model.name):
                self._model = None
                gc.collect()
            for cell, values in job.run(cells):
                spent = {"spent_s": time.time() - begin, "compile_s": self._compile_s}
                self._add([cell], MEASURED, **values, **spent)
                waiting.remove(cell)
                begin, self._compile_s = time.time(), 0.0
        # What a kernel or a compiler does not take ends its own cell, not the run.
        except Exception as error:
            self._fail(waiting, error)
        gc.collect()
        return len(cells)

    def _fail(self, cells: list[Cell], error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if "RESOURCE_EXHAUSTED" in reason:
            return self._add(cells, NO_MEMORY, reason=reason)
        if isinstance(error, NotImplementedError):
            return self._add(cells, SKIPPED, reason=reason)
        traceback.print_exc()
        self._add(cells, FAILED, reason=reason)
        try:
            jax.block_until_ready(jax.jit(lambda x: x + 1)(0))
        except jax.errors.JaxRuntimeError:
            # After an illegal access nothing runs on a GPU until the process has ended.
            self._broken = True
            print("    the device does not answer any more: run the same command again", flush=True)

    def _add(self, cells: list[Cell], status: str, **values: Any) -> None:
        for cell in cells:
            self.rows.add(cell, status, date=time.strftime("%Y-%m-%d"), **values)
        print(f"    {_headline(status, values)}", flush=True)

    def jobs(self) -> Iterator[Job]:
        """Every job: the device first, then each model from its cheapest cells to its dearest."""
        yield Job([{"kind": "device"}], 0, self._device)
        for name, config in self.configs.items():
            about = {"model": name, "layers": config.num_layers}
            groups = [(batch, ctx) for batch in self.size.batches for ctx in self.size.contexts]
            for batch, context in sorted(groups, key=lambda group: (group[0] * group[1], group)):
                yield from self._group(name, config, about, batch, context)
            yield from self._kernels(name, config)

    def _group(
        self, name: str, config: DecoderConfig, about: Cell, batch: int, context: int
    ) -> Iterator[Job]:
        size = self.size
        where = {**about, "batch": batch, "context": context}
        needs = functools.partial(size.needed_bytes, config, batch, context)
        yield Job([{"kind": "plain", **where}], needs(1), self._plain, name)
        for width in size.widths:
            cell = {"kind": "width", **where, "width": width}
            yield Job([cell], needs(width), self._width, name)
        cells = [{"kind": "speedup", **where, "acceptance": a} for a in size.acceptances]
        yield Job(cells, needs(size.num_speculative_tokens + 1), self._speedup, name)

    def _kernels(self, name: str, config: DecoderConfig) -> Iterator[Job]:
        size = self.size
        fewer = replace(config, num_layers=min(size.kernel_layers, config.num_layers))
        about = {"model": name, "layers": fewer.num_layers}
        itemsize = ITEMSIZE[size.dtype]
        for batch in size.kernel_batches:
            for context in size.contexts:
                where = {**about, "batch": batch, "context": context}
                for tokens in size.kernel_tokens:
                    for form in self._forms():
                        cell = {"kind": "form", **where, "tokens": tokens, "form": form}
                        needed = size.needed_bytes(fewer, batch, context, tokens)
                        yield Job([cell], needed, functools.partial(self._form, fewer))
                held = cached_bytes(
                    config, batch * size.capacity(context), itemsize, fewer.num_layers
                )
                for tokens in size.kernel_tokens:
                    for variant in kernels.variants(self.platform):
                        cell = {"kind": "attention", **where, "tokens": tokens, "variant": variant}
                        # The cache in two layouts, and a copy of it on the way.
                        yield Job([cell], 3 * held, functools.partial(self._attention, config))

    def _device(self, cells: list[Cell]) -> Measured:
        size = self.size
        figures = {
            "copy_bandwidth": costs.copy_bandwidth(size.copy_bytes),
            "matmul_flops": costs.matmul_flops(size.matmul_size, size.dtype),
            "memory_bytes": self.memory_bytes,
        }
        yield cells[0], figures

    def _plain(self, cells: list[Cell]) -> Measured:
        for cell in cells:
            model = self._weights(cell["model"])
            yield cell, decoding.plain_round(self.size, model, cell, self._copies())

    def _width(self, cells: list[Cell]) -> Measured:
        for cell in cells:
            width, model = cell["width"], self._weights(cell["model"])
            where = (cell["batch"], cell["context"])
            seconds = decoding.isolated_passes(self.size, model, *where, [width])[width]
            values = {"seconds": seconds}
            one = {"seconds": seconds} if width == 1 else self.rows.find({**cell, "width": 1})
            if one and "seconds" in one:
                values["relative"] = seconds / one["seconds"]
            yield cell, values

    def _speedup(self, cells: list[Cell]) -> Measured:
        yield from decoding.speculation(self.size, self._weights(cells[0]["model"]), cells)

    def _form(self, config: DecoderConfig, cells: list[Cell]) -> Measured:
        for cell in cells:
            model = random_model(cell["model"], config, self.size.dtype, FORMS[cell["form"]])
            where = (cell["batch"], cell["context"], cell["tokens"])
            yield cell, decoding.one_pass(self.size, model, *where, self._copies())

    def _forms(self) -> list[str]:
        return [name for name in FORMS if self.platform == "gpu" or name != "apart_kernel"]

    def _attention(self, config: DecoderConfig, cells: list[Cell]) -> Measured:
        for cell in cells:
            yield cell, kernels.attention_pass(self.size, config, cell, self._copies())

    def _copies(self) -> float:
        return self.rows.measured("device")[-1]["copy_bandwidth"]

    def _weights(self, name: str) -> Model:
        if self._model is None:
            begin = time.time()
            self._model = random_model(name, self.configs[name], self.size.dtype, self.form)
            params = f"{self._model.num_params / 1e9:.2f} billion parameters"
            print(f"    made {params} in {time.time() - begin:.1f} s", flush=True)
        return self._model

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
        ("round_s", "{:.3g} s a round"),
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
