"""Lookahead adapters on disk: saved, verified, loaded, attached to a model.

An adapter is a folder that plain PEFT loads too. PEFT then leaves the base model's outputs as they are, because the
saved configuration makes the LoRA an activated one (aLoRA) whose invocation token never occurs in a text.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from peft import LoraConfig, PeftConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.files import atomic_files, file_digest, read_json, write_json
from keepsight.models.lookahead import Lookahead, input_embedding
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.lora import PREFIX, Lora

ADAPTER, TOKENS, CONFIG = "adapter_model.safetensors", "lookahead_tokens.safetensors", "lookahead_config.json"
PEFT_CONFIG = "adapter_config.json"
FILES = (PEFT_CONFIG, ADAPTER, TOKENS, CONFIG)


@dataclass(frozen=True)
class Provenance:
    """Origin of an adapter or head; saved with it.

    Attributes:
        base_model: Hub id or folder of the target.
        base_version: The target's revision, or the digest of its weight file.
        template_digest: Digest of the chat template that rendered the training prompts.
        data_digest: Digest of the training data's manifest.
        training: Summary of the training: steps, prompt lengths, losses.
        keepsight_version: Version of keepsight that trained it.
    """

    base_model: str
    base_version: str = "unknown"
    template_digest: str = ""
    data_digest: str = ""
    training: dict[str, Any] = field(default_factory=dict)
    keepsight_version: str = ""


def save_lookahead(module: Lookahead, folder: Path, provenance: Provenance, card: str) -> None:
    """Write an adapter's files into a folder, beside other files; a half-written adapter does not load."""
    config = _peft_config(module)
    with atomic_files(folder, last=CONFIG) as unfinished:
        save_file(module.lora_state(), unfinished / ADAPTER, metadata={"format": "pt"})
        save_file({"lookahead_tokens": module.tokens.detach().cpu()}, unfinished / TOKENS, metadata={"format": "pt"})
        config.save_pretrained(str(unfinished))
        digests = {name: file_digest(unfinished / name) for name in (ADAPTER, TOKENS)}
        settings = {"settings": asdict(module.settings), "provenance": asdict(provenance), "digests": digests}
        write_json(unfinished / CONFIG, settings)
        (unfinished / "README.md").write_text(card, encoding="utf-8")


def _peft_config(module: Lookahead) -> LoraConfig:
    """PEFT's configuration of the module's LoRA; it lists the modules that are adapted."""
    settings = module.settings
    names = module.lora.names if module.lora is not None else ()
    return LoraConfig(
        r=settings.rank or 1,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        lora_dropout=settings.dropout,
        target_modules=[name.removeprefix(PREFIX) for name in names],
        task_type="CAUSAL_LM",
        base_model_name_or_path=module.model.config.name_or_path,
        alora_invocation_tokens=[len(input_embedding(module.model))],  # an id that no text has
        inference_mode=True,
    )


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
    """

    folder: Path
    settings: LookaheadSettings
    provenance: Provenance
    lora: dict[str, Tensor]
    tokens: Tensor
    digest: str
    _on: "WeakKeyDictionary[PreTrainedModel, tuple[Any, Tensor, Lora | None]]" = field(
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

    def _weights(self, model: PreTrainedModel) -> tuple[Tensor, Lora | None]:
        """The soft tokens and the LoRA where the model is; they do not hold the model."""
        self._check_base(model)
        module = Lookahead(model, self.settings)
        try:
            module.load_state(self.lora, self.tokens)
        except UserError as error:
            raise UserError(f"{self.folder}: {error}") from None
        if module.lora is not None:
            module.lora.requires_grad_(False).eval()
        return module.observers(1)[0].detach(), module.lora

    def _check_base(self, model: PreTrainedModel) -> None:
        loaded, expected = str(model.config.name_or_path or ""), self.provenance.base_model
        is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", loaded) and not Path(loaded).exists()
        if is_hub_id and expected and loaded != expected:
            raise UserError(f"{self.folder}: this adapter is for {expected!r}, but the model is {loaded!r}")
        hidden = input_embedding(model).shape[1]
        if self.tokens.shape[1] != hidden:
            raise UserError(
                f"{self.folder}: this adapter is for {expected!r} with hidden size {self.tokens.shape[1]}, "
                f"but the model's is {hidden}"
            )


def load_lookahead(folder: Path) -> Artifact:
    """Read and verify an adapter folder.

    Raises:
        UserError: a file is missing or corrupt, or differs from the digest recorded when it was saved.
    """
    for name in FILES:
        if not (folder / name).is_file():
            raise UserError(f"{folder}: {name} is missing; a lookahead adapter needs {', '.join(FILES)}")
    config = read_json(folder / CONFIG)
    try:
        settings, provenance = LookaheadSettings(**config["settings"]), Provenance(**config["provenance"])
        digests = {name: config["digests"][name] for name in (ADAPTER, TOKENS)}
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / CONFIG}: not a lookahead adapter's configuration ({error})") from None
    try:
        PeftConfig.from_pretrained(str(folder))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / PEFT_CONFIG}: not a PEFT configuration ({error})") from None
    for name, expected in digests.items():
        if (found := file_digest(folder / name)) != expected:
            raise UserError(
                f"{folder / name}: its digest is {found}, {CONFIG} says {expected}; fetch the adapter again"
            )
    tokens = _read(folder / TOKENS).get("lookahead_tokens")
    if tokens is None:
        raise UserError(f"{folder / TOKENS}: holds no tensor 'lookahead_tokens'; fetch the adapter again")
    return Artifact(folder, settings, provenance, _read(folder / ADAPTER), tokens, file_digest(folder / CONFIG))


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file ({error}); fetch the adapter again") from None
