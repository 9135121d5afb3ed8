"""The forms of a decoder: how layers are laid out and attention reads the cache, by backend."""

from __future__ import annotations

from dataclasses import dataclass

from specjax.errors import InputError
from specjax.models.config import DecoderConfig


@dataclass(frozen=True)
class Form:
    """How a backend lays out layers and computes attention over the cache.

    All forms give the same numbers up to rounding. `layers` is `stacked`, one array per parameter
    of all layers and a loop over it; `apart`, separate arrays per layer and a loop whose products
    select the layer's kernel, for models without experts; or `unrolled`, separate arrays and code
    per layer. `cache_attention` is `rows`, a loop over each row's filled blocks of the cache (for
    few tokens a C++ kernel); `blocks`, a loop over the blocks of the longest row, all rows at once;
    `kernel`, a GPU kernel over the filled slots and
    the window, which falls back to `blocks` for head widths that are no powers of two, with one for
    the products of experts; or `tpu_kernel`, a TPU kernel over each row's filled blocks, which
    falls back to `blocks` for a capacity that is no multiple of 64 tokens, caches in float16 and
    more than eight million tokens of capacity, four in pages of 64. Raises InputError for other
    values.
    """

    layers: str = "stacked"
    cache_attention: str = "rows"

    def __post_init__(self) -> None:
        if self.layers not in ("stacked", "apart", "unrolled"):
            raise InputError(f"layers={self.layers!r}: use stacked, apart or unrolled")
        if self.cache_attention not in ("rows", "blocks", "kernel", "tpu_kernel"):
            raise InputError(
                f"cache_attention={self.cache_attention!r}: use rows, blocks, kernel or tpu_kernel"
            )

    def check(self, config: DecoderConfig) -> None:
        """Raise InputError if this form does not support `config`."""
        if self.layers == "apart" and config.experts is not None:
            raise InputError("form: layers='apart' is not for experts; use stacked or unrolled")

    @property
    def stacked(self) -> bool:
        """Whether the parameters of all layers are stacked; see `parameter_table`."""
        return self.layers == "stacked"

    @classmethod
    def of(cls, platform: str, config: DecoderConfig, num_devices: int = 1) -> Form:
        """Return the form that is fastest on a platform: "cpu", "tpu", or the name of a GPU.

        `num_devices` is the number of devices over which the model is sharded. On a CPU, attention
        over several rows at once brings no gain. XLA copies each layer's slice of stacked weights
        before a product with several tokens, which costs most on a CPU when other work fills the
        shared cache: layers are separate if one of the MLP's kernels exceeds 1 MiB in float32,
        which does not fit in a core's own cache. On GPUs XLA also copies slices of the key/value
        cache, and the host waits for each iteration of a loop
        (`scripts/inspect_compiled_round.py`).
        """
        if platform not in ("cpu", "tpu"):
            return cls("unrolled", "kernel")
        if platform == "tpu":
            return cls("stacked", "tpu_kernel")
        apart = num_devices == 1 and config.experts is None and _is_large(config)
        return cls("apart" if apart else "stacked", "rows")

    @classmethod
    def for_training(cls, platform: str) -> Form:
        """Return the form for training, where separate branches per layer would copy gradients."""
        if platform not in ("cpu", "tpu"):
            return cls("unrolled", "kernel")
        return cls("stacked", "rows" if platform == "cpu" else "tpu_kernel")


_LARGE_KERNEL_BYTES = 1 << 20


def _is_large(config: DecoderConfig) -> bool:
    """Return whether one of the MLP's kernels, in float32, exceeds the cache of a CPU core."""
    return 4 * config.hidden_size * config.intermediate_size > _LARGE_KERNEL_BYTES


DEFAULT_FORM = Form()
