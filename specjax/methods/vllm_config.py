"""Conversion of vLLM's `--speculative-config` to a drafter and options of `generate`.

Names and defaults follow vLLM 0.32 (`vllm/config/speculative.py`), even where those of specjax
differ.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specjax.core.drafter import LoadedDrafter
from specjax.errors import InputError, shown
from specjax.fields import Whole, optional
from specjax.files.json_files import parse_json
from specjax.files.path_checks import user_path
from specjax.loading.model import Model
from specjax.methods.heads.find_head import kind_of_head, read_any_head
from specjax.methods.make import head_drafter, make_drafter
from specjax.methods.suffix import Suffix

METHODS = (
    "ngram",
    "suffix",
    "draft_model",
    "medusa",
    "eagle",
    "eagle3",
    "mtp",
    "dflash",
    "dspark",
)
_NGRAM = ("ngram", "[ngram]", "ngram_gpu", "prompt_lookup")
"""vLLM's names of prompt lookup, as a method or in place of a model."""
_MTP_OF_A_MODEL = "_mtp"
"""The suffix of vLLM's older names of `mtp`: deepseek_mtp, mimo_mtp, glm4_moe_mtp and others."""
_RULES = {
    "standard": "rejection",
    "block": "block",
    # Earlier names: drafts are greedy and equal to the target's token, or drawn.
    "strict": "rejection",
    "probabilistic": "rejection",
}
_KEYS_OF = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "suffix": (
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_min_token_prob",
    ),
}
"""The keys that only one method accepts, by method."""
_SAMPLE_METHODS = ("greedy", "probabilistic")
_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "rejection_sample_method",
    "draft_sample_method",
    *itertools.chain.from_iterable(_KEYS_OF.values()),
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "acceptance_method": ("rejection_sampler",),
    "attention_backend": ("auto",),
    "code_revision": (),
    "disable_by_batch_size": (),
    "disable_eagle_block_drop": (False,),
    "disable_logprobs": (True, False),
    "disable_mqa_scorer": (True, False),
    "disable_padded_drafter_batch": (False,),
    "draft_load_config": (),
    "draft_tensor_parallel_size": (1,),
    "dspark_draft_topk": (),
    "enable_adaptive_verification": (False,),
    "enforce_eager": (False,),
    "index_share_for_mtp_iteration": (),
    "kv_cache_dtype": ("auto",),
    "max_model_len": (),
    "moe_backend": ("auto",),
    "parallel_drafting": (False,),
    "quantization": (),
    "revision": (),
    "speculative_token_tree": (),
    "suffix_decoding_max_cached_requests": (0, 10000),
    "synthetic_acceptance_length": (),
    "synthetic_acceptance_rates": (),
    "tensor_parallel_size": (1,),
    "use_heterogeneous_vocab": (False,),
    "use_local_argmax_reduction": (False,),
}
"""Other keys of vLLM, with the values that have no effect (as null never has)."""


@dataclass(frozen=True)
class Speculation:
    """A drafter and options of `generate`, read from a config of vLLM.

    Use it as `generate(target, prompts, **speculation.options)`.
    """

    drafter: LoadedDrafter
    num_speculative_tokens: int
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...]
    verify: str

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments for `generate` and `stream`."""
        names = [entry.name for entry in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names}


def from_vllm_speculative_config(config: Mapping[str, Any] | str, target: Model) -> Speculation:
    """Return the drafter and options of `generate` for a vLLM speculative config.

    `config` is a dict or its JSON text. Methods are `METHODS` or vLLM's aliases of them. `model` is
    a directory written by specjax or in one of `methods.published_layouts`; for draft_model
    it may be anything that `load_model` accepts; for mtp it may be omitted or name the target,
    whose own modules then draft. As in vLLM, the method may be omitted if the model implies it, mtp
    drafts as many tokens as there are modules, suffix as many as its tree depth allows, and drafts
    are greedy unless `draft_sample_method` says otherwise. Unlike in vLLM, suffix uses only the
    row's own text, not earlier answers. Raises InputError naming keys and values that are unknown,
    unsupported or inconsistent with the method.
    """
    settings = _parse(config)
    method = _method(settings, target)
    length = _whole(settings, "num_speculative_tokens")
    if length is None and method == "mtp" and target.mtp is not None:
        length = target.mtp.config.num_modules
    if length is None and method == "suffix":
        length = _whole(settings, "suffix_decoding_max_tree_depth")
        length = Suffix.suffix_decoding_max_tree_depth if length is None else length
    if length is None:
        raise _fail(settings, "num_speculative_tokens", "is needed")
    schedule = _schedule(settings)
    rule = settings.get("rejection_sample_method") or "standard"
    if rule not in tuple(_RULES):
        hint = "; for given acceptance rates there is the drafter 'simulated'"
        remedy = f"use {' or '.join(list(_RULES)[:2])}{hint if rule == 'synthetic' else ''}"
        raise _fail(settings, "rejection_sample_method", remedy)
    drawn = "probabilistic" if rule == "probabilistic" else "greedy"
    sample = settings.get("draft_sample_method") or drawn
    if sample not in _SAMPLE_METHODS:
        raise _fail(settings, "draft_sample_method", f"use {' or '.join(_SAMPLE_METHODS)}")
    for taker, keys in _KEYS_OF.items():
        for key in keys:
            if key in settings and method != taker:
                raise _fail(settings, key, f"{method} does not take it; leave it out")
    if method == "ngram":
        drafter = _ngram(settings, target)
    elif method == "suffix":
        drafter = _suffix(settings, target)
    else:
        drafter = _with_model(settings, method, sample, target)
    value = dataclasses.replace(drafter.drafter, num_speculative_tokens=length)
    drafter = drafter._replace(drafter=value)
    return Speculation(drafter, length, schedule, _RULES[rule])


def _parse(config: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return the settings that have an effect; raise InputError for those that are unsupported."""
    if isinstance(config, str):
        config = parse_json(config, "speculative_config", "write a JSON object")
    if not isinstance(config, Mapping):
        raise InputError(f"speculative_config={shown(config)}: must be a JSON object")
    for key, value in config.items():
        if key in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[key]:
                raise _fail(config, key, "is not supported; leave it out")
        elif key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(_KEYS)}"
            raise _fail(config, key, f"is unknown: {hint}")
    return {key: value for key, value in config.items() if key in _KEYS and value is not None}


def _fail(config: Mapping[str, Any], key: str, remedy: str) -> InputError:
    return InputError(f"speculative_config.{key}={shown(config.get(key), 80)}: {remedy}")


def _whole(settings: dict[str, Any], key: str) -> int | None:
    return optional(Whole(1)).check(f"speculative_config.{key}", settings.get(key))


def _method(settings: dict[str, Any], target: Model) -> str:
    """Return the method of a config; as in vLLM, the model may imply it."""
    method, model = settings.get("method"), settings.get("model")
    if method is None:
        if model is None:
            raise _fail(settings, "method", f"is needed; use {', '.join(METHODS)}")
        return _method_of(model, target)
    if method in _NGRAM:
        return "ngram"
    if isinstance(method, str) and method.endswith(_MTP_OF_A_MODEL):
        return "mtp"
    if method not in METHODS:
        raise _fail(settings, "method", f"is not supported; use {', '.join(METHODS)}")
    return method


def _method_of(model: Any, target: Model) -> str:
    """Return the method that `model` implies: ngram, mtp, the kind of a head, or draft_model."""
    if model in _NGRAM:
        return "ngram"
    if target.mtp is not None and model == target.name:
        return "mtp"
    path = user_path("speculative_config.model", model) if isinstance(model, str) else None
    return (path and kind_of_head(path)) or "draft_model"


def _schedule(settings: dict[str, Any]) -> tuple[tuple[int, int, int], ...]:
    key = "num_speculative_tokens_per_batch_size"
    entries = settings.get(key, [])
    if not isinstance(entries, list | tuple) or not all(
        isinstance(entry, list | tuple)
        and len(entry) == 3
        and all(type(value) is int for value in entry)
        for entry in entries
    ):
        raise _fail(settings, key, "use a list of [low, high, k]")
    return tuple(tuple(entry) for entry in entries)


def _without_model(settings: dict[str, Any], method: str, *names: str) -> None:
    """Raise InputError if the settings have a model or a way of sampling.

    Methods that copy tokens use neither; `names` are the values of `model` that mean the method
    itself.
    """
    if settings.get("model", method) not in names:
        raise _fail(settings, "model", f"{method} takes no model; leave it out")
    if settings.get("draft_sample_method", "greedy") != "greedy":
        raise _fail(
            settings,
            "draft_sample_method",
            f"{method} has no distribution to draw from; leave it out",
        )


def _ngram(settings: dict[str, Any], target: Model) -> LoadedDrafter:
    """Return prompt lookup as in vLLM: the earliest longest match, with bounds of 5 by default."""
    _without_model(settings, "ngram", *_NGRAM)
    high, low = _whole(settings, "prompt_lookup_max"), _whole(settings, "prompt_lookup_min")
    return make_drafter(
        "ngram",
        target,
        prompt_lookup_max=high or low or 5,
        prompt_lookup_min=low or high or 5,
        match="earliest",
    )


def _suffix(settings: dict[str, Any], target: Model) -> LoadedDrafter:
    """Return suffix decoding of the row's own text, as a chain, with vLLM's defaults."""
    _without_model(settings, "suffix", "suffix")
    return make_drafter(
        "suffix", target, **{key: settings[key] for key in _KEYS_OF["suffix"] if key in settings}
    )


def _with_model(settings: dict[str, Any], method: str, sample: str, target: Model) -> LoadedDrafter:
    model = settings.get("model")
    if method == "mtp" and model in (None, target.name):
        return make_drafter(method, target, draft_sample_method=sample)
    if not isinstance(model, str) or not model:
        raise _fail(settings, "model", f"{method} needs a directory or a name")
    path = user_path("speculative_config.model", model)
    if method == "draft_model" and kind_of_head(path) is None:
        return make_drafter(method, target, path=model, draft_sample_method=sample)
    head = read_any_head(model, target, "speculative_config.model", layer_ids="input")
    if head.kind != method:
        raise _fail(settings, "method", f"{model} is a head of the kind {head.kind}")
    return head_drafter(head, target, draft_sample_method=sample)
