"""The lookahead module: n soft tokens, and LoRA that is on for them alone (arXiv 2603.10899, section 3).

A saved adapter is a folder that plain PEFT loads too. PEFT then leaves the base model's outputs as they are, because
the saved configuration makes the LoRA an activated one (aLoRA) whose invocation token is beyond any vocabulary.
"""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft import LoraConfig, PeftConfig
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import Self

from keepsight.errors import UserError, one_line
from keepsight.files import at_home, file_digest, read_json, write_json
from keepsight.models.artifacts import Artifact, as_weights, check_digest, read_tensors, write_tensors
from keepsight.models.card import CardBasics, Provenance, example, metrics_table, write_card
from keepsight.models.decoder import embedding_std, input_embedding, input_shape
from keepsight.models.distributed import whole_weights
from keepsight.models.identity import Identity, logger, template_digest
from keepsight.models.lookahead_settings import HeadWeights, LookaheadSettings, checked_weights
from keepsight.models.lora import PREFIX, FoldedLora, LastRows, Lora, chosen_targets

ADAPTER = "adapter_model.safetensors"
TOKENS = "lookahead_tokens.safetensors"
CONFIG = "lookahead_config.json"
PEFT_CONFIG = "adapter_config.json"
NO_TOKEN = 2**31 - 1
"""Id of the invocation token, beyond any vocabulary: the first free id may become a token that a user adds."""
_ABOUT = """\
A keepsight lookahead module ([LookaheadKV](https://arxiv.org/abs/2603.10899)): {tokens} soft tokens and {lora}
that predict which prompt entries of the KV cache the coming answer of `{base_model}`
attends to. It never changes what the model says; it tells which entries to keep."""


class Lookahead(nn.Module):
    """A lookahead module beside its base model, which is unchanged except within `active()`.

    Attributes:
        model: The base model.
        soft_tokens: Embeds the soft tokens, [n, hidden] float32; a module of its own, because ZeRO-3 gathers the
            weights of a module when that module is called.
        settings: The module's shape.
        lora: The updates of the model's linear modules; None for rank 0 or no targets.

    Raises:
        UserError: the settings name modules that the model does not have.
    """

    def __init__(self, model: PreTrainedModel, settings: LookaheadSettings) -> None:
        super().__init__()
        self.model = model
        self.settings = settings
        with whole_weights(model.get_input_embeddings()):
            embedding = input_embedding(model)
            random = torch.randn(settings.tokens, embedding.shape[1], dtype=torch.float32, device=embedding.device)
            random = random * embedding_std(model)
        self.soft_tokens = nn.Embedding.from_pretrained(random, freeze=False)
        self.lora = None
        linears = chosen_targets(model, settings.targets) if settings.rank else {}
        if linears:
            self.lora = Lora(linears, settings.rank, settings.alpha, settings.dropout)

    @property
    def tokens(self) -> Tensor:
        """The weights of `soft_tokens`."""
        return self.soft_tokens.weight

    def active(self) -> AbstractContextManager[None]:
        """The LoRA is on within the block."""
        return nullcontext() if self.lora is None else self.lora.attached()

    def observers(self, batch: int) -> Tensor:
        """The soft tokens as input embeddings [batch, n, hidden] in the model's dtype."""
        indices = torch.arange(self.settings.tokens, device=self.tokens.device)
        return self.soft_tokens(indices).to(self.model.dtype).expand(batch, -1, -1)

    def lora_state(self) -> dict[str, Tensor]:
        """The LoRA's tensors under the names PEFT saves them with."""
        parameters = {} if self.lora is None else self.lora.tensors()
        return {name: parameter.detach().contiguous().cpu() for name, parameter in parameters.items()}

    def load_state(self, lora: dict[str, Tensor], tokens: Tensor) -> None:
        """Set the weights; a `UserError` if a tensor is missing, surplus, or of another shape."""
        parameters: dict[str, Tensor] = {} if self.lora is None else dict(self.lora.tensors())
        unmatched_names = set(parameters) ^ set(lora)
        if unmatched_names:
            raise UserError(
                f"missing or surplus LoRA tensor {min(unmatched_names)!r}: the adapter is for another model",
                field="adapter",
                code="model",
            )
        parameters["lookahead_tokens"] = self.tokens
        values = {**lora, "lookahead_tokens": tokens}
        for name, parameter in parameters.items():
            if values[name].shape != parameter.shape:
                raise UserError(
                    f"tensor {name!r} has shape {list(values[name].shape)}, this model needs {list(parameter.shape)}: "
                    "the adapter is for another model",
                    field=name,
                    code="model",
                )
            with torch.no_grad():
                parameter.copy_(values[name])

    def adapter(self) -> "LookaheadAdapter":
        """A copy of the weights, to be saved."""
        return LookaheadAdapter(self.settings, self.lora_state(), self.tokens.detach().cpu().clone())


@dataclass(frozen=True)
class _Config:
    """Content of lookahead_config.json."""

    settings: LookaheadSettings
    provenance: Provenance
    digests: dict[str, str]
    head_weights: HeadWeights | None = None


@dataclass(frozen=True, eq=False)
class _CopyOnModel:
    """The module's weights in a model's dtype and on its device, without a reference to the model."""

    dtype: torch.dtype
    device: torch.device
    tokens: Tensor
    lora: FoldedLora | None


@dataclass(eq=False)
class LookaheadAdapter(Artifact):
    """The weights of a lookahead module, apart from any model.

    Attributes:
        settings: The module's shape.
        lora: The LoRA's tensors under the names PEFT saves them with.
        tokens: [n, hidden] float32.
        head_weights: Weights of heads that `keepsight finetune` learned; None where it did not run.
        provenance: Origin of the adapter.
        folder: Folder that it was loaded from; "a lookahead adapter" before it is saved.
        digest: Digest of `lookahead_config.json`, which holds the settings and the digests of the tensors' files.
        invocation: Largest id of a token that makes PEFT apply the LoRA.
    """

    kind = "lookahead adapter"
    files = (PEFT_CONFIG, ADAPTER, TOKENS, CONFIG)

    settings: LookaheadSettings
    lora: dict[str, Tensor] = field(repr=False)
    tokens: Tensor = field(repr=False)
    head_weights: HeadWeights | None = None
    provenance: Provenance = field(default_factory=lambda: Provenance(""), repr=False)
    folder: Path = Path("a lookahead adapter")
    digest: str = ""
    invocation: int = NO_TOKEN
    _copies: "WeakKeyDictionary[PreTrainedModel, _CopyOnModel]" = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )

    def __getstate__(self) -> dict[str, Any]:
        """Without the copies on models' devices, for pickles and copies."""
        return {name: value for name, value in self.__dict__.items() if name != "_copies"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _copies=WeakKeyDictionary())

    def __repr__(self) -> str:
        return f"LookaheadAdapter({str(self.folder)!r})"

    @contextmanager
    def attached(self, model: PreTrainedModel, rows: LastRows | None = None) -> Iterator[Tensor]:
        """Within the block the module's LoRA is on, for all tokens or the last ones; after it the model is as it was.

        Yields:
            The soft tokens as input embeddings [n, hidden] in the model's dtype.

        Raises:
            UserError: the adapter was trained for another model.
        """
        device = input_embedding(model).device
        copy = self._copies.get(model)
        if copy is None or copy.dtype != model.dtype or copy.device != device:
            module = self.module(model)
            lora = None if module.lora is None else FoldedLora(module.lora, model.dtype)
            copy = _CopyOnModel(model.dtype, device, module.observers(1)[0].detach(), lora)
            self._copies[model] = copy
        if copy.lora is None:
            yield copy.tokens
            return
        with copy.lora.attached(rows):
            yield copy.tokens

    def module(self, model: PreTrainedModel) -> Lookahead:
        """The module beside a model, for further training.

        Raises:
            UserError: the adapter was trained for another model.
        """
        self.check_base(model)
        module = Lookahead(model, self.settings)
        try:
            module.load_state(self.lora, self.tokens)
        except UserError as error:
            raise error.reworded(f"{self.folder}: {error}") from None
        return module

    def check_base(self, model: PreTrainedModel) -> None:
        """Warn if a model's weights are not those of the adapter's base model.

        Raises:
            UserError: the adapter was trained for another model.
        """
        self.require_base(model)
        vocabulary, _ = input_shape(model)
        if self.invocation < vocabulary:
            logger.warning(
                "%s: plain PEFT would apply this LoRA where token %d occurs, which this model has; save it again",
                self.folder,
                self.invocation,
            )
        self.provenance.warn_of_another_model(self.folder, model)

    def require_base(self, model: PreTrainedModel) -> None:
        """Refuse (`UserError`) a model, loaded or on the meta device, that the adapter was not trained for."""
        folder = self.folder
        base_model = self.provenance.base_model
        model_name = str(model.config.name_or_path or "")
        is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", model_name) and not Path(model_name).exists()
        if is_hub_id and base_model and model_name != base_model:
            raise UserError(
                f"{folder}: this adapter is for {base_model!r}, but the model is {model_name!r}",
                field="adapter",
                code="model",
            )
        _, hidden_size = input_shape(model)
        adapter_size = self.tokens.shape[1]
        if adapter_size != hidden_size:
            raise UserError(
                f"{folder}: this adapter is for {base_model!r} with hidden size {adapter_size}, but the model's is "
                f"{hidden_size}",
                field="adapter",
                code="model",
            )

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Warn, once, if the tokenizer or its chat template is not that of the training prompts."""
        present = Identity(template=template_digest(tokenizer))
        self.provenance.identity.warn(present, f"{self.folder} was trained")

    @classmethod
    def load(cls, folder: Path, model: PreTrainedModel | None = None) -> Self:
        """Read and verify an adapter's folder; see `Artifact.load`. It is not attached to the model."""
        folder = Path(at_home(folder))
        cls._require_files(folder)
        config: _Config = read_json(folder / CONFIG, _Config)
        try:
            config.settings.check()
        except UserError as error:
            raise error.reworded(f"{folder / CONFIG}: {error}") from None
        for name in (ADAPTER, TOKENS, PEFT_CONFIG):
            check_digest(folder / name, config.digests.get(name, "missing"), CONFIG)
        token_tensors = as_weights(folder / TOKENS, read_tensors(folder / TOKENS), torch.float32)
        lora = as_weights(folder / ADAPTER, read_tensors(folder / ADAPTER), torch.float32)
        if list(token_tensors) != ["lookahead_tokens"] or token_tensors["lookahead_tokens"].dim() != 2:
            raise UserError(
                f"{folder / TOKENS}: expected one tensor 'lookahead_tokens', [n, hidden]; fetch it again",
                field=TOKENS,
                code="file",
            )
        head_weights = None
        if config.head_weights is not None:
            head_weights = checked_weights(config.head_weights, f"{folder / CONFIG}: head_weights")
        adapter = cls(
            config.settings,
            lora,
            token_tensors["lookahead_tokens"],
            head_weights,
            config.provenance,
            folder,
            digest=file_digest(folder / CONFIG),
            invocation=_invocation(folder),
        )
        adapter._check_shapes(folder)
        if model is not None:
            adapter.check_base(model)
        return adapter

    def card(self, basics: CardBasics, measured: Any = "") -> str:
        """The model card; `measured` holds `eval_kl`, `eval_recall`, `eval_tau` of the last measurement."""
        settings = self.settings
        lora = "no LoRA"
        if settings.rank and settings.targets != ["none"]:
            lora = f"a LoRA of rank {settings.rank}"
        if not isinstance(measured, str):
            measured = metrics_table(measured, "mean over layers")
        use = example(basics.base_model, "LookaheadKV", 128)
        use += "\n\nPlain `peft.PeftModel.from_pretrained` loads it too and leaves the base model's outputs unchanged."
        return write_card(
            basics,
            tags=["lookaheadkv", "kv-cache", "lora"],
            about=_ABOUT.format(tokens=settings.tokens, lora=lora, base_model=basics.base_model),
            use=use,
            heading="Fidelity on held-out training samples",
            measured=measured,
            library="peft",
        )

    def _write(self, folder: Path) -> None:
        self._check_shapes(self.folder)
        self._peft_config().save_pretrained(str(folder))
        digests = write_tensors(folder / ADAPTER, self.lora)
        digests |= write_tensors(folder / TOKENS, {"lookahead_tokens": self.tokens})
        digests[PEFT_CONFIG] = file_digest(folder / PEFT_CONFIG)
        values: dict[str, Any] = {
            "settings": asdict(self.settings),
            "provenance": asdict(self.provenance),
            "digests": digests,
        }
        if self.head_weights:
            values["head_weights"] = self.head_weights
        write_json(folder / CONFIG, values)
        for path in self.folder.glob("*.png"):  # the pictures of its card
            if path.is_file() and not path.is_symlink():
                (folder / path.name).write_bytes(path.read_bytes())

    def _peft_config(self) -> LoraConfig:
        """PEFT's configuration of the LoRA; it lists the modules that are adapted."""
        settings = self.settings
        config = LoraConfig(
            r=settings.rank or 1,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]
            lora_dropout=settings.dropout,
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.provenance.base_model,
            alora_invocation_tokens=[NO_TOKEN],
            inference_mode=True,
        )
        names = [name.removeprefix(PREFIX).partition(".lora_")[0] for name in self.lora]
        config.target_modules = list(dict.fromkeys(names))  # LoraConfig would make a set, in any order
        return config

    def _check_shapes(self, folder: Path) -> None:
        """Check tensors against the settings, so that settings alone allocate nothing."""
        settings = self.settings
        if len(self.tokens) != settings.tokens:
            raise UserError(
                f"{folder / TOKENS}: holds {len(self.tokens)} soft tokens, {CONFIG} says {settings.tokens}",
                field=TOKENS,
                code="file",
            )
        for name, tensor in self.lora.items():
            rank = None  # lora_A is [r, in], lora_B is [out, r]
            if "lora_A" in name:
                rank = list(tensor.shape[:1])
            elif "lora_B" in name:
                rank = list(tensor.shape[1:])
            if rank != [settings.rank]:
                raise UserError(
                    f"{folder / ADAPTER}: tensor {name!r} has rank {rank}, {CONFIG} says {settings.rank}",
                    field=name,
                    code="file",
                )


def recorded_provenance(folder: Path) -> Provenance:
    """What an adapter's folder says of its origin, read without the weights; UserError if it holds no adapter."""
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{folder}: {CONFIG} is missing; name the folder of a lookahead adapter", field=CONFIG, code="missing"
        )
    config: _Config = read_json(folder / CONFIG, _Config)
    return config.provenance


def _invocation(folder: Path) -> int:
    """The largest id that makes PEFT apply the LoRA."""
    read_json(folder / PEFT_CONFIG, dict[str, Any])
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
        return max(int(token) for token in config.alora_invocation_tokens or [-1])
    except Exception as error:  # PEFT raises anything
        raise UserError(
            f"{folder / PEFT_CONFIG}: not a PEFT configuration ({one_line(error, 200)})", field=PEFT_CONFIG, code="file"
        ) from None
