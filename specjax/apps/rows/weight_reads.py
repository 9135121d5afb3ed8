"""How fast plain decoding reads the target's weights, as a number and in words."""

from __future__ import annotations

from specjax.apps.rows.records import RunHeader
from specjax.apps.rows.statistics import Figures
from specjax.core.parameter_sizes import megabytes


def weight_bandwidth(header: RunHeader, figures: Figures) -> float | None:
    """Return the bytes of weights that plain decoding read per second; None if it is not known.

    It is the bytes of a pass (`theory.weight_bytes`) times the passes per second. A pass with empty
    slots counts as a full one, which is too much for experts only.
    """
    if header.pass_bytes is None or figures.plain_passes_per_second is None:
        return None
    return header.pass_bytes * figures.plain_passes_per_second


def weight_reads_line(
    header: RunHeader, figures: Figures, memory_bandwidth: float | None
) -> str | None:
    """Return a line with that bandwidth and its share of `memory_bandwidth` in bytes per second.

    The share is left out if `memory_bandwidth` is None. Returns None if there is nothing to say.
    """
    achieved = weight_bandwidth(header, figures)
    if achieved is None:
        return None
    per_pass = megabytes(header.pass_bytes)
    line = f"plain decoding reads {_gigabytes(achieved)} of weights ({per_pass} per pass)"
    if memory_bandwidth is None:
        return line
    share = f"{achieved / memory_bandwidth:.0%} of the {_gigabytes(memory_bandwidth)}"
    return f"{line}: {share} that this machine's memory gives"


def _gigabytes(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
