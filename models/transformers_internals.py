"""Private names of transformers that keepsight touches, all in this file; they were read in transformers 5.18 to 5.24.

Public interfaces lack what is asked for here. `tests/models/test_transformers_internals.py` fails where one of these
names is gone or means something else, and where another file touches a private name.
"""

import inspect
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, TrainingArguments, cache_utils
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin

if TYPE_CHECKING or hasattr(cache_utils, "DummyLayer"):
    from transformers.cache_utils import DummyLayer as DummyLayer
else:  # transformers 5.19 and earlier

    class DummyLayer:
        """The place in a cache of a decoder layer that keeps nothing, as later versions of transformers have it."""

        supports_early_init = False
        is_compileable = True
        is_croppable = True

        def __init__(self, **_: Any) -> None:
            self.is_initialized = True
            self.keys = None
            self.values = None

        def offload(self) -> None:
            """It holds nothing."""

        def prefetch(self) -> None:
            """It holds nothing."""

        def reset(self) -> None:
            """It holds nothing."""

        def crop(self, tokens: int) -> None:
            """It holds nothing."""

        def reorder_cache(self, beams: Any) -> None:
            """It holds nothing."""

        def batch_repeat_interleave(self, repeats: int) -> None:
            """It holds nothing."""

        def batch_select_indices(self, indices: Any) -> None:
            """It holds nothing."""


TRAINER_HOOKS = (
    "_get_train_sampler",
    "_load_from_checkpoint",
    "_move_model_to_device",
    "_prepare_inputs",
    "_save_checkpoint",
    "_save_optimizer_and_scheduler",
)
"""Private methods of transformers' Trainer that `train/trainer.py` overrides or calls; it has no public hooks there."""


# generate


def arguments_of_generate() -> dict[str, Any]:
    """The arguments and variables of the `model.generate` that is running; none if it is not.

    It does not pass the streamer on to a `custom_generate`, silently drops an assistant model, and replaces a mask of
    ones, so that a `custom_generate` cannot tell what its caller asked for: only the frame of `generate` has all.
    """
    return _locals_of("generate")


def put_tokenizer_back() -> None:
    """Put a `tokenizer` back among the arguments of the running `model.generate`.

    It is dropped while transformers reads the signature of a `custom_generate`, and the criteria of `stop_strings`
    need it.
    """
    variables = _locals_of("_extract_generation_mode_kwargs")
    tokenizer = variables.get("generation_mode_kwargs", {}).get("tokenizer")
    if tokenizer is not None:
        variables["kwargs"]["tokenizer"] = tokenizer


def _locals_of(name: str) -> dict[str, Any]:
    """The arguments and variables of a method of `GenerationMixin` that is running; none if it is not."""
    code = inspect.unwrap(vars(GenerationMixin)[name]).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def is_of_caller(cache: Cache) -> bool:
    """Whether the caller of `model.generate` gave it this cache; one that it made itself has no mark."""
    return bool(getattr(cache, "_is_user_defined", False))


# Models and their configurations


def attention_of_config(config: Any) -> str:
    """The name of the attention implementation that a model of this configuration runs."""
    return str(config._attn_implementation)


def set_attention_of_config(config: Any, name: str) -> None:
    """Name the attention implementation in a configuration, and not in those of the model's other parts.

    `PreTrainedModel.set_attn_implementation` is the public way; it refuses names that it cannot load, and would also
    change a vision tower.
    """
    config._attn_implementation = {"": name}


def replaces_attention(decoder: PreTrainedModel) -> bool:
    """Whether a model computes its attention by the AttentionInterface; it reads the source of the model's file."""
    return bool(decoder._can_set_attn_implementation())


def commit_of(config: Any) -> str | None:
    """The Hub commit that a model was loaded from; None for a folder, and where nothing was loaded."""
    return getattr(config, "_commit_hash", None)


# Trainer


def use_one_gpu(arguments: TrainingArguments) -> None:
    """Keep the Trainer from wrapping the model in nn.DataParallel, which would copy it to every GPU at each step."""
    arguments._n_gpu = 1
