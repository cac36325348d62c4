"""Lookahead adapters on disk: saved, verified, loaded, attached to a model.

An adapter is a folder that plain PEFT loads too. PEFT then leaves the base model's outputs as they are, because the
saved configuration makes the LoRA an activated one (aLoRA) whose invocation token never occurs in a text.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from peft import LoraConfig, PeftConfig
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keepsight.errors import UserError
from keepsight.files import atomic_files, file_digest, read_json, write_json, write_readme
from keepsight.models.folded_lora import FoldedLora
from keepsight.models.head_weights import HeadWeights, checked_weights
from keepsight.models.lookahead import Lookahead, input_embedding, input_width
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.lora import PREFIX
from keepsight.models.versions import warn_of_another_base, warn_of_another_tokenizer
from keepsight.models.weight_files import as_weights, check_digest, one_line, read_tensors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ADAPTER, TOKENS, CONFIG = "adapter_model.safetensors", "lookahead_tokens.safetensors", "lookahead_config.json"
PEFT_CONFIG = "adapter_config.json"
FILES = (PEFT_CONFIG, ADAPTER, TOKENS, CONFIG)


@dataclass(frozen=True)
class Provenance:
    """Origin of an adapter or head; saved with it.

    Attributes:
        base_model: Hub id of the target, or its name without a slash; never a folder's path, for this is published.
        base_version: The target's revision, or the digest of its weight file.
        template_digest: Digest of the chat template that rendered the training prompts.
        data_digest: Digest of the training data's manifest.
        training: Summary of the training: steps, prompt lengths, losses.
        keepsight_version: Version of keepsight that trained it.
        vocabulary_digest: Digest of the tokenizer's vocabulary; empty where it is not recorded.
        trained_on: Which prompts it was trained on, see `keepsight.train.seen`; empty where that is not known.
    """

    base_model: str
    base_version: str = "unknown"
    template_digest: str = ""
    data_digest: str = ""
    training: dict[str, Any] = field(default_factory=dict)
    keepsight_version: str = ""
    vocabulary_digest: str = ""
    trained_on: str = ""


@dataclass(frozen=True)
class _Config:
    """What lookahead_config.json holds."""

    settings: LookaheadSettings
    provenance: Provenance
    digests: dict[str, str]
    head_weights: HeadWeights | None = None


def save_lookahead(
    module: Lookahead, folder: Path, provenance: Provenance, card: str, curves: "Figure | None" = None
) -> None:
    """Write an adapter's files into a folder, beside other files; a half-written adapter does not load.

    With `curves`, those of the training, training.png is one of them.

    Raises:
        UserError: a tensor is not whole.
    """
    config = _peft_config(module, provenance)
    _check_shapes(folder, module.settings, module.tokens, module.lora_state())
    with atomic_files(folder, last=CONFIG) as unfinished:
        save_tensors(module, unfinished)
        config.save_pretrained(str(unfinished))
        digests = {name: file_digest(unfinished / name) for name in (ADAPTER, TOKENS, PEFT_CONFIG)}
        settings = {"settings": asdict(module.settings), "provenance": asdict(provenance), "digests": digests}
        write_json(unfinished / CONFIG, settings)
        write_readme(unfinished, card, curves)


def save_tensors(module: Lookahead, folder: Path) -> None:
    """Write a module's LoRA and soft tokens into a folder."""
    save_file(module.lora_state(), folder / ADAPTER, metadata={"format": "pt"})
    save_file({"lookahead_tokens": module.tokens.detach().cpu()}, folder / TOKENS, metadata={"format": "pt"})


def _peft_config(module: Lookahead, provenance: Provenance) -> LoraConfig:
    """PEFT's configuration of the module's LoRA; it lists the modules that are adapted."""
    settings = module.settings
    names = module.lora.names if module.lora is not None else ()
    embedding: Any = module.model.get_input_embeddings()  # under ZeRO-3 its weight is empty
    config = LoraConfig(
        r=settings.rank or 1,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        task_type="CAUSAL_LM",
        base_model_name_or_path=provenance.base_model,
        alora_invocation_tokens=[embedding.num_embeddings],  # an id that no text has
        inference_mode=True,
    )
    config.target_modules = [name.removeprefix(PREFIX) for name in names]  # LoraConfig would make a set, in any order
    return config


@dataclass(frozen=True, eq=False)
class Artifact:
    """A lookahead adapter read from its folder, verified, not yet attached to a model.

    Attributes:
        folder: Folder that it was read from.
        settings: The module's shape.
        provenance: Origin of the adapter.
        lora: The LoRA's tensors under the names PEFT saves them with.
        tokens: [n, hidden] float32.
        digest: Digest of `lookahead_config.json`, which holds the settings and the digests of the tensors' files.
        head_weights: What `keepsight train_head_weights` or `keepsight finetune` learned; None where neither ran.
    """

    folder: Path
    settings: LookaheadSettings
    provenance: Provenance
    lora: dict[str, Tensor]
    tokens: Tensor
    digest: str
    head_weights: HeadWeights | None = None
    _on: "WeakKeyDictionary[PreTrainedModel, tuple[Any, Tensor, FoldedLora | None]]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    @contextmanager
    def attached(self, model: PreTrainedModel) -> Iterator[Tensor]:
        """Within the block the module's LoRA is on; after it the model is as it was.

        Yields:
            The soft tokens as input embeddings [n, hidden] in the model's dtype.

        Raises:
            UserError: the adapter was trained for another model.
        """
        key = model.dtype, input_embedding(model).device
        if self._on.get(model, (None,))[0] != key:
            self._on[model] = key, *self._weights(model)
        _, tokens, lora = self._on[model]
        with nullcontext() if lora is None else lora.attached():
            yield tokens

    def module(self, model: PreTrainedModel) -> Lookahead:
        """The module beside a model, as it can be trained further.

        Raises:
            UserError: the adapter was trained for another model.
        """
        self.check_base(model)
        module = Lookahead(model, self.settings)
        try:
            module.load_state(self.lora, self.tokens)
        except UserError as error:
            raise UserError(f"{self.folder}: {error}") from None
        return module

    def _weights(self, model: PreTrainedModel) -> tuple[Tensor, FoldedLora | None]:
        """The soft tokens and the LoRA where the model is; they do not hold the model."""
        module = self.module(model)
        lora = None if module.lora is None else FoldedLora(module.lora, model.dtype)
        return module.observers(1)[0].detach(), lora

    def check_base(self, model: PreTrainedModel) -> None:
        """Warn of a model with other weights than those that the adapter was trained on.

        Raises:
            UserError: the adapter was trained for another model.
        """
        loaded, expected = str(model.config.name_or_path or ""), self.provenance.base_model
        is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", loaded) and not Path(loaded).exists()
        if is_hub_id and expected and loaded != expected:
            raise UserError(f"{self.folder}: this adapter is for {expected!r}, but the model is {loaded!r}")
        hidden = input_width(model)
        if self.tokens.shape[1] != hidden:
            raise UserError(
                f"{self.folder}: this adapter is for {expected!r} with hidden size {self.tokens.shape[1]}, "
                f"but the model's is {hidden}"
            )
        warn_of_another_base(self.folder, expected, self.provenance.base_version, model)

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Warn, once, of another vocabulary or chat template than those of the prompts that it was trained on."""
        origin = self.provenance
        warn_of_another_tokenizer(self.folder, origin.template_digest, origin.vocabulary_digest, tokenizer)


def load_lookahead(folder: Path) -> Artifact:
    """Read and verify an adapter folder.

    Raises:
        UserError: a file is missing or corrupt, or differs from the digest recorded when it was saved.
    """
    for name in FILES:
        if not (folder / name).is_file():
            raise UserError(f"{folder}: {name} is missing; a lookahead adapter needs {', '.join(FILES)}")
    config: _Config = read_json(folder / CONFIG, _Config)
    try:
        config.settings.check()
    except UserError as error:
        raise UserError(f"{folder / CONFIG}: {error}") from None
    for name in (ADAPTER, TOKENS, *sorted({PEFT_CONFIG} & config.digests.keys())):
        check_digest(folder / name, config.digests.get(name, "missing"), CONFIG)
    read_json(folder / PEFT_CONFIG, dict[str, Any])
    try:
        PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # whatever PEFT stumbles over
        raise UserError(f"{folder / PEFT_CONFIG}: not a PEFT configuration ({one_line(error)})") from None
    tokens, lora = (_finite(folder / name) for name in (TOKENS, ADAPTER))
    if list(tokens) != ["lookahead_tokens"] or tokens["lookahead_tokens"].dim() != 2:
        raise UserError(f"{folder / TOKENS}: expected one tensor 'lookahead_tokens', [n, hidden]; fetch it again")
    _check_shapes(folder, config.settings, tokens["lookahead_tokens"], lora)
    digest = file_digest(folder / CONFIG)
    weights = _head_weights(folder, config)
    return Artifact(folder, config.settings, config.provenance, lora, tokens["lookahead_tokens"], digest, weights)


def _head_weights(folder: Path, config: _Config) -> HeadWeights | None:
    """The adapter's weights of heads, if it has any; refused where `Global` cannot take them."""
    if config.head_weights is None:
        return None
    if config.settings.sharing != "model":
        raise UserError(f"{folder / CONFIG}: head_weights need settings.sharing model, not {config.settings.sharing!r}")
    return checked_weights(config.head_weights, f"{folder / CONFIG}: head_weights")


def _finite(path: Path) -> dict[str, Tensor]:
    return as_weights(path, read_tensors(path), torch.float32)


def _check_shapes(folder: Path, settings: LookaheadSettings, tokens: Tensor, lora: dict[str, Tensor]) -> None:
    """Check what a module will be made of against the tensors, so that settings alone allocate nothing."""
    if len(tokens) != settings.tokens:
        raise UserError(f"{folder / TOKENS}: holds {len(tokens)} soft tokens, {CONFIG} says {settings.tokens}")
    for name, tensor in lora.items():
        ranks = {"lora_A": tensor.shape[:1], "lora_B": tensor.shape[1:]}
        if (rank := next((list(size) for part, size in ranks.items() if part in name), None)) != [settings.rank]:
            raise UserError(f"{folder / ADAPTER}: tensor {name!r} has rank {rank}, {CONFIG} says {settings.rank}")
