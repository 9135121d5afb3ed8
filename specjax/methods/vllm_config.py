"""Conversion of vLLM's `--speculative-config` to a drafter and options of `generate`.

Names and defaults follow vLLM 0.32 (`vllm/config/speculative.py`), even where those of specjax
differ.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specjax.core.drafter import LoadedDrafter
from specjax.errors import InputError, shown
from specjax.fields import Flag, Whole, optional
from specjax.files.json_files import parse_json
from specjax.files.path_checks import user_path
from specjax.loading.model import Model
from specjax.methods import registry
from specjax.methods.find_head import kind_of_head, read_any_head
from specjax.methods.make import head_drafter, make_drafter
from specjax.methods.method import Method
from specjax.methods.simulated import SIMULATED
from specjax.models.head_config import HeadConfig

METHODS = {name: method for name, method in registry.METHODS.items() if method.vllm is not None}
"""The methods that vLLM has, by the name that both have for them."""
_RULES = {
    "standard": "rejection",
    "block": "block",
    # Earlier names: drafts are greedy and equal to the target's token, or drawn.
    "strict": "rejection",
    "probabilistic": "rejection",
}
_SAMPLE_METHODS = ("greedy", "probabilistic")
_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "rejection_sample_method",
    "draft_sample_method",
    "parallel_drafting",
    *(key for method in METHODS.values() for key in method.vllm.keys),
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
    method = _in_parallel(settings, _method(settings, target))
    length = _whole(settings, "num_speculative_tokens")
    if length is None and (own := _own_config(method, target)) is not None:
        length = own.num_modules
    if length is None and (key := method.vllm.length_key):
        length = _whole(settings, key)
        length = getattr(method.drafter, key) if length is None else length
    if length is None:
        raise _fail(settings, "num_speculative_tokens", "is needed")
    schedule = _schedule(settings)
    rule = settings.get("rejection_sample_method") or "standard"
    if rule not in tuple(_RULES):
        hint = f"; for given acceptance rates there is the drafter {SIMULATED.name!r}"
        remedy = f"use {' or '.join(list(_RULES)[:2])}{hint if rule == 'synthetic' else ''}"
        raise _fail(settings, "rejection_sample_method", remedy)
    drawn = "probabilistic" if rule == "probabilistic" else "greedy"
    sample = settings.get("draft_sample_method") or drawn
    if sample not in _SAMPLE_METHODS:
        raise _fail(settings, "draft_sample_method", f"use {' or '.join(_SAMPLE_METHODS)}")
    for taker in METHODS.values():
        for key in taker.vllm.keys:
            if key in settings and method is not taker:
                raise _fail(settings, key, f"{method.name} does not take it; leave it out")
    if method.vllm.options is not None:
        drafter = _without_model(settings, method, target)
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


def _method(settings: dict[str, Any], target: Model) -> Method:
    """Return the method of a config; as in vLLM, the model may imply it."""
    name, model = settings.get("method"), settings.get("model")
    if name is None:
        if model is None:
            raise _fail(settings, "method", f"is needed; use {', '.join(METHODS)}")
        return _method_of(model, target)
    for method in METHODS.values():
        ending = method.vllm.ending
        if name in (method.name, *method.vllm.aliases):
            return method
        if ending and isinstance(name, str) and name.endswith(ending):
            return method
    raise _fail(settings, "method", f"is not supported; use {', '.join(METHODS)}")


def _in_parallel(settings: dict[str, Any], method: Method) -> Method:
    """Return the method that a method means with `parallel_drafting`, if that is set."""
    if not Flag().check(
        "speculative_config.parallel_drafting", settings.get("parallel_drafting", False)
    ):
        return method
    for other in METHODS.values():
        if other.vllm.parallel_of and method.name in (other.name, other.vllm.parallel_of):
            return other
    raise _fail(settings, "parallel_drafting", f"is not supported for {method.name}; leave it out")


def _method_of(model: Any, target: Model) -> Method:
    """Return the method that `model` implies: by its name, or the kind of head or model it is."""
    for method in METHODS.values():
        if model in method.vllm.aliases:
            return method
        if model == target.name and _own_config(method, target) is not None:
            return method
    path = user_path("speculative_config.model", model) if isinstance(model, str) else None
    if path is not None and (kind := kind_of_head(path)) is not None:
        return METHODS[kind]
    return next(method for method in METHODS.values() if method.of_model is not None)


def _own_config(method: Method, target: Model) -> HeadConfig | None:
    """Return the config of the head for a method that the target brings with it, or None."""
    return None if method.own_head is None else method.own_head.config(target)


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


def _without_model(settings: dict[str, Any], method: Method, target: Model) -> LoadedDrafter:
    """Return the drafter of a method that copies tokens, which uses no model and draws none.

    Raises InputError if the settings have a model, unless it means the method itself, or a way of
    sampling.
    """
    if settings.get("model", method.name) not in (method.name, *method.vllm.aliases):
        raise _fail(settings, "model", f"{method.name} takes no model; leave it out")
    if settings.get("draft_sample_method", "greedy") != "greedy":
        raise _fail(
            settings,
            "draft_sample_method",
            f"{method.name} has no distribution to draw from; leave it out",
        )
    values = {
        key: value if kind is None else kind.check(f"speculative_config.{key}", value)
        for key, kind in method.vllm.keys.items()
        if (value := settings.get(key)) is not None
    }
    return make_drafter(method.name, target, **method.vllm.options(values))


def _with_model(
    settings: dict[str, Any], method: Method, sample: str, target: Model
) -> LoadedDrafter:
    """Return the drafter of a method with a head or a model of its own, or the target's head."""
    name, model = method.name, settings.get("model")
    if method.own_head is not None and model in (None, target.name):
        return make_drafter(name, target, draft_sample_method=sample)
    if not isinstance(model, str) or not model:
        raise _fail(settings, "model", f"{name} needs a directory or a name")
    path = user_path("speculative_config.model", model)
    if method.of_model is not None and kind_of_head(path) is None:
        return make_drafter(name, target, path=model, draft_sample_method=sample)
    head = read_any_head(model, target, "speculative_config.model", layer_ids="input")
    if head.kind != name:
        raise _fail(settings, "method", f"{model} is a head of the kind {head.kind}")
    return head_drafter(head, target, draft_sample_method=sample)
