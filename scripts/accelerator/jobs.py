"""The cells of a size, and how each is measured."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from accelerator import decoding, kernels
from accelerator.rows import Cell, Rows
from accelerator.sizes import ITEMSIZE, Size, cached_bytes
from accelerator.synthetic import random_model
from specjax.loading.model import Model
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Form
from specjax.tuning import costs

Measured = Iterator[tuple[Cell, dict[str, Any]]]

FORMS = {
    f"{layers}_{kind}": Form(layers, kind)
    for layers in ("stacked", "unrolled")
    for kind in ("rows", "blocks", "whole", "kernel")
    if layers == "unrolled" or kind != "kernel"
}
"""The forms of interest on accelerators by name: how layers lie, and how the cache is read."""


@dataclass(frozen=True)
class Job:
    """Cells that are measured together, the bytes they need, and whether they need a model."""

    cells: list[Cell]
    needed_bytes: int
    run: Callable[[list[Cell]], Measured]
    model: str | None = None


class Workbench:
    """The jobs of a size on the default device; it holds one model's weights at a time.

    `configs` are the models' shapes, with the layers that fit; `rows` are earlier measurements.
    """

    def __init__(
        self,
        size: Size,
        configs: dict[str, DecoderConfig],
        platform: str,
        form: Form,
        memory_bytes: int | None,
        rows: Rows,
    ) -> None:
        self.size, self.configs = size, configs
        self._platform, self._form = platform, form
        self._memory_bytes, self._rows = memory_bytes, rows
        self._model: Model | None = None

    def prepare(self, job: Job) -> None:
        """Free the weights that a job does not need."""
        if self._model is not None and job.model != self._model.name:
            self._model = None
            gc.collect()

    def jobs(self) -> Iterator[Job]:
        """Every job: the device first, then each model's cells from cheap to expensive."""
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
                        yield Job([cell], needed, functools.partial(self._one_form, fewer))
                held = cached_bytes(
                    config, batch * size.capacity(context), itemsize, fewer.num_layers
                )
                for tokens in size.kernel_tokens:
                    for variant in kernels.variants(self._platform):
                        cell = {"kind": "attention", **where, "tokens": tokens, "variant": variant}
                        # The cache in two layouts, and a temporary copy.
                        yield Job([cell], 3 * held, functools.partial(self._attention, config))

    def _device(self, cells: list[Cell]) -> Measured:
        size = self.size
        figures = {
            "copy_bandwidth": costs.copy_bandwidth(size.copy_bytes),
            "matmul_flops": costs.matmul_flops(size.matmul_size, size.dtype),
            "memory_bytes": self._memory_bytes,
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
            one = {"seconds": seconds} if width == 1 else self._rows.find({**cell, "width": 1})
            if one and "seconds" in one:
                values["relative"] = seconds / one["seconds"]
            yield cell, values

    def _speedup(self, cells: list[Cell]) -> Measured:
        yield from decoding.speculation(self.size, self._weights(cells[0]["model"]), cells)

    def _one_form(self, config: DecoderConfig, cells: list[Cell]) -> Measured:
        for cell in cells:
            model = random_model(cell["model"], config, self.size.dtype, FORMS[cell["form"]])
            where = (cell["batch"], cell["context"], cell["tokens"])
            yield cell, decoding.one_pass(self.size, model, *where, self._copies())

    def _forms(self) -> list[str]:
        """Those that may pay here: rows one by one only on a CPU, a kernel only on a GPU."""
        others = {"kernel": "gpu", "rows": "cpu"}
        return [
            name
            for name, form in FORMS.items()
            if others.get(form.cache_attention, self._platform) == self._platform
        ]

    def _attention(self, config: DecoderConfig, cells: list[Cell]) -> Measured:
        for cell in cells:
            yield cell, kernels.attention_pass(self.size, config, cell, self._copies())

    def _copies(self) -> float:
        return self._rows.measured("device")[-1]["copy_bandwidth"]

    def _weights(self, name: str) -> Model:
        if self._model is None:
            begin = time.time()
            self._model = random_model(name, self.configs[name], self.size.dtype, self._form)
            params = f"{self._model.num_params / 1e9:.2f} billion parameters"
            print(f"    made {params} in {time.time() - begin:.1f} s", flush=True)
        return self._model
