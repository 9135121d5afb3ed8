"""What is measured at each size, and what it needs of a device's memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specjax import theory
from specjax.models.config import DecoderConfig

ITEMSIZE = {"float32": 4, "bfloat16": 2}
CACHE_BLOCK = 256
"""Tokens that attention reads at a time, for the size of its scores."""
_SLACK = 1.03
"""For what compiling tries out on the device, and for gaps between arrays."""


@dataclass(frozen=True)
class Size:
    """Shapes, cells and repetitions.

    Models named in `fewer_layers` get as many layers as fit; the others either fit or not.
    `rounds` is the length of a timed speculative run, whose draft length is
    `num_speculative_tokens`, and each time is the median of `runs` runs.
    """

    models: dict[str, DecoderConfig]
    fewer_layers: tuple[str, ...]
    dtype: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    widths: tuple[int, ...]
    acceptances: tuple[float, ...]
    num_speculative_tokens: int
    rounds: int
    runs: int
    copy_bytes: int
    matmul_size: int

    @property
    def reach(self) -> int:
        """The most tokens that a timed run can commit after its context."""
        return (self.rounds + 1) * (self.num_speculative_tokens + 1)

    def capacity(self, context: int) -> int:
        """Cache slots per row, for a timed run after a context."""
        return -(-(context + self.reach) // CACHE_BLOCK) * CACHE_BLOCK

    def committed(self, context: int) -> int:
        """The mean committed length of a timed plain run, which isolated passes are timed at."""
        return context + self.plain_rounds // 2

    @property
    def plain_rounds(self) -> int:
        """Rounds of a timed plain run: about as many tokens as a speculative one commits."""
        return 2 * self.rounds

    def needed_bytes(self, config: DecoderConfig, batch: int, context: int, width: int) -> int:
        """Weights, cache, windows, logits and temporaries of passes over `width` slots per row."""
        itemsize = ITEMSIZE[self.dtype]
        held = theory.memory(
            model_shape(config),
            batch=batch,
            capacity=self.capacity(context),
            num_nodes=width - 1,
            weight_itemsize=itemsize,
            cache_itemsize=itemsize,
        )
        heads = config.num_heads + 2 * config.num_kv_heads
        activations = 4 * config.hidden_size + 3 * config.intermediate_size
        activations += (2 * heads + 3 * config.num_heads) * config.head_dim
        scores = 2 * config.num_heads * CACHE_BLOCK
        # One layer's weights may be copied out of the stack.
        copied = layer_params(config) * itemsize
        needed = held.total + batch * width * (activations + scores) * 4 + copied
        return int(needed * _SLACK)

    def fitting_layers(self, config: DecoderConfig, limit: int) -> int:
        """The most layers with which the smallest batch fits at the longest context; 0 for none."""
        for layers in range(config.num_layers, 0, -1):
            fewer = replace(config, num_layers=layers)
            if self.needed_bytes(fewer, min(self.batches), max(self.contexts), 1) <= limit:
                return layers
        return 0


def model_shape(config: DecoderConfig) -> theory.ModelShape:
    """The sizes that `specjax.theory` computes with."""
    return theory.ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        tie_word_embeddings=config.tie_word_embeddings,
    )


def layer_params(config: DecoderConfig) -> int:
    """Parameters that one layer multiplies with."""
    head = config.vocab_size * config.hidden_size
    return (model_shape(config).num_matmul_params() - head) // config.num_layers


_LLAMA_8B = DecoderConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=131072,
    rope_theta=500000.0,
)
_TINY = DecoderConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=4096,
)
SIZES = {
    "full": Size(
        models={
            "8b": _LLAMA_8B,
            "70b": replace(
                _LLAMA_8B,
                hidden_size=8192,
                intermediate_size=28672,
                num_layers=80,
                num_heads=64,
            ),
        },
        fewer_layers=("70b",),
        dtype="bfloat16",
        batches=(1, 4, 16, 64),
        contexts=(1024, 16384),
        widths=(1, 2, 4, 8, 16, 32, 64),
        acceptances=(0.6, 0.7, 0.8, 0.9),
        num_speculative_tokens=4,
        rounds=32,
        runs=5,
        copy_bytes=1 << 30,
        matmul_size=8192,
    ),
    "debug": Size(
        models={"tiny": _TINY},
        fewer_layers=(),
        dtype="float32",
        batches=(1, 2),
        contexts=(24,),
        widths=(1, 8),
        acceptances=(0.6, 0.9),
        num_speculative_tokens=2,
        rounds=6,
        runs=2,
        copy_bytes=1 << 20,
        matmul_size=128,
    ),
}
