"""The sizes at which the accelerator benchmark measures."""

from __future__ import annotations

from dataclasses import dataclass

from specjax import theory
from specjax.models.config import DecoderConfig

ITEMSIZE = {"float32": 4, "bfloat16": 2}
_CACHE_BLOCK = 256
"""The number of cached tokens that attention reads at a time."""


@dataclass(frozen=True)
class Size:
    """A model's shape, and the batches, contexts and repetitions to measure.

    `rounds` is the length of a timed speculative run, whose draft length is
    `num_speculative_tokens`, and each time is the median of `runs` runs.
    """

    model: DecoderConfig
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
        """The maximum number of tokens that a timed run can commit after its context."""
        return (self.rounds + 1) * (self.num_speculative_tokens + 1)

    @property
    def plain_rounds(self) -> int:
        """The rounds of a timed plain run, which commits about as much as a speculative one."""
        return 2 * self.rounds

    def capacity(self, context: int) -> int:
        """Return the cache slots per row for a timed run after a context."""
        return -(-(context + self.reach) // _CACHE_BLOCK) * _CACHE_BLOCK

    def committed(self, context: int) -> int:
        """Return the mean committed length of a timed plain run, to time isolated passes at."""
        return context + self.plain_rounds // 2

    def widths_of(self, batch: int) -> list[int]:
        """Return the widths whose passes are timed, including that of a full draft.

        Passes over more than a thousand tokens in all are left out, since arithmetic bounds them.
        """
        widths = {1, self.num_speculative_tokens + 1}
        return sorted(widths | {width for width in self.widths if width * batch <= 1024})


def model_shape(config: DecoderConfig) -> theory.ModelShape:
    """Return the model's shape as `specjax.theory` needs it."""
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


SIZES = {
    # Llama's 8B shape.
    "8b": Size(
        model=DecoderConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_positions=131072,
            rope_theta=500000.0,
        ),
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
        model=DecoderConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=96,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            max_positions=4096,
        ),
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
