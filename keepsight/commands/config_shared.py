"""Keys that several commands share (see `keepsight.commands.config`): model, methods, data, tasks, training."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, Field, FiniteFloat, NonNegativeInt, PositiveInt

from keepsight.endpoint import ServerSettings
from keepsight.eval.judge import Judge
from keepsight.eval.tasks.registry import Benchmarks
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.train.settings import ReplaySettings


def one_of(*known: str) -> AfterValidator:
    """A type's check that a text is one of several."""

    def check(text: str) -> str:
        if text not in known:
            raise ValueError(f"is unknown; choose one of {', '.join(known)}")
        return text

    return AfterValidator(check)


def shared_selection() -> LookaheadSettings:
    """A lookahead module's settings where neither recipe nor arguments give them."""
    return LookaheadSettings().selecting("shared")


NonEmpty = Field(min_length=1)
Counts = Annotated[list[PositiveInt], NonEmpty]


@dataclass
class ModelConfig:
    """The base model.

    Attributes:
        id: Hub id or local folder.
        revision: Branch, tag or commit on the Hub.
        packaged: Bundled weights, PACKAGE/FILE.gguf of a Python package, used when the Hub cannot be reached.
        packaged_id: Hub id of the bundled model; the file is used for no other model.
        packaged_digest: Expected digest of the bundled file, sha256:...
        dtype: auto, float32, bfloat16 or float16.
        device: auto, cpu, cuda, cuda:1, ...
        attention: auto, sdpa, eager, or flash_attention_2, _3 or _4 (experimental).
        template: Arguments of its chat template that differ from the template's own, such as {enable_thinking: false}.
        quantize: nf4 or int8: bitsandbytes quantises the weights while they are loaded.
        device_map: auto divides the layers over the GPUs of one process (experimental), and keeps on the CPU those that
            do not fit; fsdp2 shards every layer over the processes that train a lookahead module.
        trust_remote_code: Run code from the model's repository; leave it off unless you have read that code.
    """

    id: str = "???"
    revision: str | None = None
    packaged: str | None = None
    packaged_id: str | None = None
    packaged_digest: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    template: dict[str, Any] = field(default_factory=dict)
    quantize: str | None = None
    device_map: str | None = None
    trust_remote_code: bool = False

    @property
    def own_file(self) -> str | None:
        """The packaged file, if it holds this model."""
        return self.packaged if self.packaged_id == self.id else None


@dataclass
class DraftConfig:
    """The draft of the methods that need one (SpecKV, SpecPC): at most one of `layers`, `id` and `head`.

    Attributes:
        layers: Indices of the base model's layers that make up the draft, ascending; see `keepsight bench draft`.
        id: Hub id or local folder of another model with the same vocabulary.
        revision: Branch, tag or commit of the model or head on the Hub.
        head: EAGLE draft head of the base model, a folder or Hub id, instead of a model.
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
        adapter: Lookahead adapter: a folder, a Hub id, or shipped:NAME for one that comes with keepsight.
        retrieval: Retrieval head: a folder, a Hub id, or shipped:NAME for one that comes with keepsight.
    """

    adapter: str | None = None
    retrieval: str | None = None
    draft: DraftConfig = field(default_factory=DraftConfig)


@dataclass
class OfTable:
    """Key of every command that measures a table of a paper.

    Attributes:
        preset: A paper's table, which sets the keys that you do not; see below.
    """

    preset: str | None = None


@dataclass
class DataKeys(UsesModel):
    """Which training data is made, and who answers.

    Attributes:
        mixture: Name of a file in recipes/mixtures/, or a path to a YAML file of your own.
        rows: Folder of JSON Lines files whose rows stand in for the Hub's data sets, as the mixture's `local` says.
        limit: Number of samples.
        max_new_tokens: Longest answer of the data in tokens.
        temperature: Samples the answers; 0 decodes greedily.
        top_p: Samples from the likeliest tokens that together have this probability.
        batch_tokens: Prompt tokens per batch of answers; lower it when memory runs out.
        backend: Who answers: transformers, in this process; vllm, in this process; or server, at server.url.
        vllm: Arguments of vLLM's engine, such as {gpu_memory_utilization: 0.5, max_model_len: 4096}.
        skip: Bad rows and refused prompts at most, in a run; null skips any number, 0 ends the run at the first.
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
class EvalKeys:
    """What is compared on what.

    Attributes:
        tasks: Benchmarks or their tasks: niah, ruler, ruler_vt, longbench, jsonl, ...
        lengths: Prompt lengths of generated tasks, in tokens.
        methods: Names, or {name: NAME, option: value}.
        budgets: Entries per layer and KV head, or ratios of the prompt such as 0.1.
    """

    tasks: Annotated[list[str], NonEmpty] = field(default_factory=lambda: ["niah_single"])
    lengths: Counts = field(default_factory=lambda: [512, 1024])
    methods: list[Any] = field(default_factory=lambda: ["full", "oracle", "lookaheadkv", "snapkv", "streamingllm"])
    budgets: list[Any] = field(default_factory=lambda: [64, 128])


@dataclass
class TaskKeys(Benchmarks, EvalKeys, UsesMethods):
    """Which samples are drawn, and how they are asked.

    Attributes:
        out: Folder for the results.
        bits: Bit widths for the methods that quantize entries, a row for each; the method's default when empty.
        samples: Samples per task and length, or per file of a task; 0 for all of a file.
        seed: Seed of generated tasks.
        protocol: Whose prompts, truncation and post-processing RULER and LongBench follow: reference, kvcache-factory,
            kvpress or draft-based.
        max_tokens: Longest prompt of the jsonl task in tokens; longer ones are dropped and counted.
        max_new_tokens: Shortens every answer to this many tokens; 0 for each task's own limit.
        question: Whether methods see the question while they compress: seen, unseen or multi. unseen compresses only
            what stands before the question; so does multi, and asks every question about a context of one cache.
        plugins: Modules of your own, or entry points of the group keepsight, that are imported first: what they add to
            METHODS can be named in `methods`.
        skip: Rows of files that make no sample, and answers that the judge gives no verdict on, at most; null skips any
            number, 0 ends the run at the first.
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
    plugins: list[str] = field(default_factory=list)
    skip: NonNegativeInt | None = None


@dataclass
class Training(UsesModel):
    """Keys of every training command.

    Attributes:
        data: Folder made by `keepsight data`.
        out: Folder for the trained weights and their model card; checkpoints and logs go to `training` in it.
    """

    data: str = "???"
    out: str = "???"
    replay: ReplaySettings = field(default_factory=ReplaySettings)


@dataclass
class CardKeys(Training):
    """What the model card of newly trained weights says.

    Attributes:
        title: Title of the model card.
        base: Hub id of the base model for the card, where model.id is a folder; no folder's path is published.
        license: Licence of the trained weights, as an identifier the Hub knows; the base model's by default.
        data_notes: Text for the model card on the origin and licences of the data.
    """

    title: str = "keepsight module"
    base: str | None = None
    license: str | None = None
    data_notes: str = ""
