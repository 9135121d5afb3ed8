"""The record of a method: everything that lists, commands and checks say about it."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, NamedTuple

from specjax.core.drafter import Drafter, LoadedDrafter
from specjax.fields import Kind
from specjax.loading.model import Model
from specjax.methods.heads.head import Head
from specjax.models.head_config import HeadConfig


class Needs(enum.Enum):
    """What a method needs in addition to a target, with the text of `specjax.decode --list`."""

    NOTHING = "nothing else"
    CORPUS = "an index of texts (python -m specjax.corpus_index)"
    HEAD = "a trained head"
    MODEL = "any model, at best with the target's tokenizer"
    MODULES = "a target with MTP modules, or modules trained for it"

    @property
    def weights(self) -> bool:
        """Whether these are trained weights, which a path may name."""
        return self in (Needs.HEAD, Needs.MODEL, Needs.MODULES)


class OwnHead(NamedTuple):
    """A head that targets may bring with them, and what messages call it.

    `config(target)` returns its config and `head(target)` all of it, or None for a target without.
    """

    what: str
    config: Callable[[Model], HeadConfig | None]
    head: Callable[[Model], Head | None]


@dataclass(frozen=True)
class VllmMethod:
    """What a method is in vLLM's `--speculative-config`; its name there is the record's.

    `aliases` are other names of it, also in place of a model, and `ending` that of further ones.
    `keys` are the keys that no other method takes, each with the kind of its value, or None if the
    drafter's options check it. The value of `length_key` is the draft length if none is given.
    `options` returns the drafter's options for the given values of `keys`; such a method copies
    tokens and takes no model. With `parallel_drafting` the method `parallel_of` means this one.
    """

    aliases: tuple[str, ...] = ()
    ending: str = ""
    keys: Mapping[str, Kind | None] = field(default_factory=dict)
    length_key: str = ""
    parallel_of: str = ""
    options: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None


@dataclass(frozen=True)
class Training:
    """A way to train a method: a command's module, and its config file with overrides.

    `name` is the one that checkpoints record. `alone` says whether a head is made for a frozen
    target, and `reads_stored` whether the features that `train.features` stores by default are
    read.
    """

    name: str
    module: str
    config: str
    options: tuple[str, ...] = ()
    alone: bool = True
    reads_stored: bool = True

    def command(self, size: str = "") -> list[str]:
        """Return the arguments after `python -m`, with `size` (":debug", or "") in the config."""
        return [self.module, f"--config={self.config}{size}", *self.options]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of drafting, by the name that commands and `make_drafter` know.

    The options are the keyword-only fields of `drafter`, and the keyword-only arguments of what
    loads it (`methods.load`).
    """

    name: str
    paper: str
    """Where it was published, or "" for one of specjax."""
    drafter: type[Drafter]
    needs: Needs = Needs.NOTHING
    length: str = ""
    """The usual draft length in words where it depends on a head; see `usual_length`."""

    of_target: Callable[..., LoadedDrafter] | None = None
    """A function (target, **options) that makes the drafter of a method without weights; by default
    the options are its fields."""
    check: Callable[..., None] | None = None
    """A function (**options) that raises InputError for options that are incompatible, before a
    target is loaded; see `check_options`."""
    head: type[HeadConfig] | None = None
    """The class of the configs of its heads; None without trained heads."""
    of_model: Callable[..., LoadedDrafter] | None = None
    """A function (path, target, weights, **options) that makes the drafter of a whole model, where
    `path` is no head; None if only heads can draft."""
    own_head: OwnHead | None = None
    """The head that a target may bring with it, used before those that come with specjax."""
    replays: bool = False
    """Whether it replays the output of plain decoding, its option `continuations`."""

    alone: str = ""
    """The reason why it cannot be joined with others by name; "" if it can."""
    in_all: bool = True
    """Whether `all` of `specjax.spec_bench` includes it if it has weights or needs none."""
    joined_in_all: bool = False
    """Whether `all` then includes prompt lookup joined with it, too."""
    vllm: VllmMethod | None = None
    """What it is in vLLM's config, if vLLM has it."""
    training: tuple[Training, ...] = ()
    """The commands that train it."""

    @property
    def reads_only_heads(self) -> bool:
        """Whether a path can name nothing but a head, rather than a model that holds or is one."""
        return self.head is not None and self.of_model is None and self.own_head is None

    @property
    def usual_length(self) -> str:
        """The default maximum draft length as a text, such as "up to 4 draft tokens"."""
        if self.length:
            return self.length
        length = getattr(self.drafter, "usual_length", None)
        if length is None:
            takes_vocabulary = "vocab_size" in inspect.signature(self.drafter).parameters
            needed = {"vocab_size": 1 << 16} if takes_vocabulary else {}
            length = self.drafter(**needed).num_speculative_tokens
        return f"up to {length} draft token{'s' * (length > 1)}"

    def check_options(self, options: Mapping[str, Any]) -> None:
        """Raise InputError for options that are incompatible, before a target is loaded.

        Without a `check`, a drafter is made of them; one with fields that depend on the target is
        checked when it is loaded.
        """
        if self.check is not None:
            self.check(**options)
            return
        known = fields(self.drafter)
        if not any(each.default is each.default_factory is MISSING for each in known):
            names = {each.name for each in known}
            self.drafter(**{name: value for name, value in options.items() if name in names})
