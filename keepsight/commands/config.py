"""The configuration of each command: a dataclass whose fields are the keys that the command reads.

A class's docstring is the command's help, and its `Attributes` are the help of the keys. Keys are checked against the
annotated types (pydantic's) when a command line is parsed; see `keepsight.commands.parse`. Importing this file
imports neither torch nor transformers.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, FiniteFloat, NonNegativeInt, PositiveInt

from keepsight.endpoint import ServerSettings
from keepsight.eval.judge import Judge
from keepsight.eval.tasks.registry import Benchmarks
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.train.settings import (
    DraftHeadSettings,
    FinetuneSettings,
    LookaheadTrainSettings,
    ReplaySettings,
    RetrievalHeadSettings,
)


def one_of(*known: str) -> AfterValidator:
    """A type's check that a text is one of several."""

    def check(text: str) -> str:
        if text not in known:
            raise ValueError(f"is unknown; choose one of {', '.join(known)}")
        return text

    return AfterValidator(check)


NonEmpty = Field(min_length=1)
Counts = Annotated[list[PositiveInt], NonEmpty]
COMPARED = ("lookaheadkv", "snapkv", "pyramidkv", "adakv", "tova", "streamingllm")
"""Methods that the benchmarks compare by default."""


@dataclass
class ModelConfig:
    """The base model.

    Attributes:
        id: Hub id or local folder.
        revision: Branch, tag or commit on the Hub.
        packaged: PACKAGE/FILE.gguf of an installed Python package, used when the Hub cannot be reached.
        packaged_id: Hub id of the model in the packaged file; the file is used for no other model.
        packaged_digest: Expected digest of the packaged file, sha256:...
        dtype: auto, float32, bfloat16 or float16.
        device: auto, cpu, cuda, cuda:1, ...
        attention: auto, sdpa, eager or flash_attention_2.
        template: Arguments of its chat template that differ from the template's own, such as {enable_thinking: false}.
        quantize: nf4 or int8: bitsandbytes quantises the weights while they are loaded.
        device_map: auto divides the layers over the GPUs of one process and keeps on the CPU those that do not fit;
            fsdp2 shards every layer over the processes that train a lookahead module.
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
    """Keys of every command that reads a model.

    Attributes:
        model: The base model.
    """

    model: ModelConfig = field(default_factory=ModelConfig)


@dataclass
class UsesMethods(UsesModel):
    """Keys of every command that runs methods.

    Attributes:
        adapter: Lookahead adapter: a folder, a Hub id, or shipped:NAME for one that comes with keepsight.
        retrieval: Retrieval head: a folder, a Hub id, or shipped:NAME for one that comes with keepsight.
        draft: The draft of the methods that need one.
    """

    adapter: str | None = None
    retrieval: str | None = None
    draft: DraftConfig = field(default_factory=DraftConfig)


@dataclass
class DataKeys(UsesModel):
    """Which training data is made, and who answers.

    Attributes:
        mixture: Name of a file in recipes/mixtures/, or a path to a YAML file of your own.
        limit: Number of samples.
        max_new_tokens: Longest answer of the data in tokens.
        temperature: Samples the answers; 0 decodes greedily.
        top_p: Samples from the likeliest tokens that together have this probability.
        backend: Who answers: transformers, in this process; vllm, in this process; or server, at server.url.
        server: The server of backend=server.
        vllm: Arguments of vLLM's engine, such as {gpu_memory_utilization: 0.5, max_model_len: 4096}.
        skip: Bad rows and refused prompts at most, in a run; null skips any number, 0 ends the run at the first.
    """

    mixture: str = "offline"
    limit: PositiveInt = 200
    max_new_tokens: PositiveInt = 128
    temperature: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    backend: Annotated[str, one_of("transformers", "vllm", "server")] = "transformers"
    server: ServerSettings = field(default_factory=ServerSettings)
    vllm: dict[str, Any] = field(default_factory=dict)
    skip: NonNegativeInt | None = None


@dataclass
class Data(DataKeys):
    """keepsight data: make training data: prompts of a mixture and the base model's answers.

        keepsight data recipe=smollm2-135m out=runs/data limit=200
        keepsight data recipe=llama8b mixture=my_mixture.yaml out=runs/data limit=20000
        keepsight data recipe=llama8b backend=server server.url=http://localhost:8000/v1 out=runs/data limit=20000
        keepsight data stats runs/data

    The data are resumable shards: a run that was killed resumes when the same command is run again.

    Attributes:
        out: Folder for the shards and the manifest.
        seed: Random seed of the mixture's draws, and of sampled answers.
        shard_size: Samples per shard.
        batch_tokens: Prompt tokens per batch; lower it when memory runs out.
    """

    out: str = "???"
    seed: int = 0
    shard_size: PositiveInt = 64
    batch_tokens: PositiveInt = 8192


@dataclass
class DataStats:
    """keepsight data stats: what a data folder contains, as a table and a plot.

        keepsight data stats runs/data
        keepsight data stats runs/data out=runs/lengths.png

    For each source: the number of samples, the shortest, median and longest prompt and answer in tokens, the samples
    whose prompt occurred before, and the answers that were cut off at the longest length allowed.

    Attributes:
        folder: Made by `keepsight data`.
        out: The plot, a PNG; stats.png in the folder by default.
    """

    POSITIONAL: ClassVar = ("folder",)
    folder: str = "???"
    out: str | None = None


@dataclass
class Training(UsesModel):
    """Keys of every training command.

    Attributes:
        data: Folder made by `keepsight data`.
        out: Folder for the trained weights and their model card; checkpoints and logs go to `training` in it.
        replay: How the model's outputs are stored in a training that uses each of them several times.
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


@dataclass
class Train(CardKeys):
    """keepsight train: train a lookahead module to predict which prompt entries the model's answers attend to.

        accelerate launch train_lookahead.py recipe=smollm2-135m data=runs/data out=runs/adapter
        python train_lookahead.py recipe=smollm2-135m data=runs/data out=runs/adapter train.steps=50 train.held_out=4
        keepsight train data=runs/data out=runs/ablation 'lookahead.tokens=[8,16,32]' 'lookahead.rank=[8,32]'

    Writes the adapter, its model card and training curves to `out`. A training that was stopped resumes from its last
    checkpoint when the same command is run again.

    Several values for a key of lookahead.* (tokens, rank, targets, alpha, dropout) or train.* (learning_rate, clip,
    far) make an ablation: every combination is a module with its own optimiser, which learns what it would learn
    alone, and all learn from the same outputs of the base model, which are most of the work. Values that are lists
    are written [[qv],[all]]. `out` then gets a table (ablation.md, .tex, .csv) and a plot of the fidelity on held-out
    samples, and in cells/ an adapter for each combination:

        keepsight eval out=runs/eval 'methods=[{name: lookaheadkv, adapter: runs/ablation/cells/tokens8-rank8}]'

    Attributes:
        init: Adapter to start from, a folder, a Hub id or shipped:NAME; random soft tokens by default.
        max_prompt_tokens: Leaves out longer prompts; 0 keeps all.
        lookahead: Shape of the lookahead module.
        train: Optimisation of the lookahead module.
    """

    VARIED: ClassVar = (
        *(f"lookahead.{name}" for name in ("tokens", "rank", "targets", "alpha", "dropout")),
        *(f"train.{name}" for name in ("learning_rate", "clip", "far")),
    )
    title: str = "keepsight lookahead adapter"
    init: str | None = None
    max_prompt_tokens: NonNegativeInt = 0
    lookahead: LookaheadSettings = field(default_factory=LookaheadSettings)
    train: LookaheadTrainSettings = field(default_factory=LookaheadTrainSettings)


@dataclass
class Finetune(Training):
    """keepsight finetune: train a lookahead module further, on what evicting with it costs the model's answers.

        keepsight finetune recipe=smollm2-135m adapter=runs/adapter data=runs/data out=runs/finetuned
        accelerate launch -m keepsight finetune recipe=llama3.1-8b adapter=DIR data=DIR out=DIR
        keepsight finetune adapter=runs/adapter data=runs/data out=runs/finetuned max_prompt_tokens=4096
        keepsight finetune adapter=runs/adapter data=runs/data out=runs/weighted finetune.freeze_module=true

    `keepsight train` teaches a module to attend to what answers attend to. This continues from there: the base model
    reads its own answer again behind a soft form of the selection, and the gradient of the KL divergence from its
    predictions with the full cache flows through the selection to the soft tokens, the LoRA and one weight per KV
    head, by which the head's importance is multiplied before the heads compete for the budget. The answer's attention
    to the whole prompt is stored for gradients: max_prompt_tokens= bounds the memory. With finetune.freeze_module=true
    only the weights of heads learn, in minutes.

    Any adapter can be trained further. Where the heads of its layers do not share one budget yet, they do afterwards
    (lookahead.floor=0.2 lookahead.sharing=model in its settings). Its shape stays, and its model card gets a section.
    A training that was stopped resumes from its last checkpoint when the same command is run again.

    Attributes:
        adapter: The lookahead adapter to start from: a folder, a Hub id, or shipped:NAME.
        max_prompt_tokens: Leaves out longer prompts; 0 keeps all.
        finetune: Optimisation.
    """

    adapter: str | None = None
    max_prompt_tokens: NonNegativeInt = 0
    finetune: FinetuneSettings = field(default_factory=FinetuneSettings)


@dataclass
class TrainDraftHead(CardKeys):
    """keepsight train_draft_head: train an EAGLE-3 draft head.

        accelerate launch train_draft_head.py recipe=smollm2-135m data=runs/data out=runs/draft_head
        python train_draft_head.py recipe=smollm2-135m data=runs/data out=runs/draft_head model.dtype=bfloat16

    Writes the head, its model card and training curves to `out`. A training that was stopped resumes from its last
    checkpoint when the same command is run again.

    Attributes:
        features: Folder for the base model's hidden states over the data, written if absent and then read instead of
            running the model; worth it over several epochs, for about 4 * hidden size * 2 bytes per token.
        init: EAGLE-3 head to start from, a folder or a Hub id; a new one by default.
        draft_head: Shape and training of the draft head.
    """

    title: str = "keepsight draft head"
    features: str | None = None
    init: str | None = None
    draft_head: DraftHeadSettings = field(default_factory=DraftHeadSettings)


@dataclass
class TrainRetrievalHead(CardKeys):
    """keepsight train_retrieval_head: prune a draft head to a retrieval head, and distil the model's attention into it.

        accelerate launch train_retrieval_head.py recipe=smollm2-135m head=runs/head data=runs/data out=runs/retrieval
        python train_retrieval_head.py head=runs/head data=runs/data out=runs/retrieval retrieval_head.features=none
        python train_retrieval_head.py head=runs/retrieval data=runs/data out=runs/further retrieval_head.groups=2

    Writes the head, its model card and training curves to `out`. A training that was stopped resumes from its last
    checkpoint when the same command is run again. A retrieval head as head= is distilled further, and may get groups
    of layers that select for themselves.

    Attributes:
        head: Draft head to prune, or retrieval head to distil further, a folder or a Hub id; random projections by
            default.
        retrieval_head: Variant and distillation of the retrieval head.
    """

    title: str = "keepsight retrieval head"
    head: str | None = None
    retrieval_head: RetrievalHeadSettings = field(default_factory=RetrievalHeadSettings)


@dataclass
class EvalKeys(UsesMethods):
    """What is compared on what.

    Attributes:
        tasks: Benchmarks, such as niah, ruler, longbench, jsonl, or their tasks, such as ruler_vt.
        lengths: Prompt lengths of generated tasks, in tokens.
        methods: Names, or {name: NAME, option: value}.
        budgets: KV budgets: entries per layer and KV head, or ratios of the prompt such as 0.1.
    """

    tasks: Annotated[list[str], NonEmpty] = field(default_factory=lambda: ["niah_single"])
    lengths: Counts = field(default_factory=lambda: [512, 1024])
    methods: list[Any] = field(default_factory=lambda: ["full", "oracle", "lookaheadkv", "snapkv", "streamingllm"])
    budgets: list[Any] = field(default_factory=lambda: [64, 128])


@dataclass
class TaskKeys(Benchmarks, EvalKeys):
    """Which samples are drawn, and how they are asked.

    Attributes:
        out: Folder for the results.
        bits: Bit widths for the methods that quantize entries, a row for each; the method's default when empty.
        samples: Number of samples per task and length; per file of tasks that are read from files (0 for all).
        seed: Seed of generated tasks.
        protocol: Whose prompts, truncation and post-processing RULER and LongBench follow: reference, kvcache-factory,
            kvpress or draft-based.
        max_tokens: Longest prompt of the jsonl task in tokens; longer ones are dropped and counted.
        max_new_tokens: Shortens every answer to this many tokens; 0 for each task's own limit.
        judge: Who scores MT-Bench and LongBench-Write.
        question: What methods see while they compress: seen (the whole prompt), unseen (only what stands before the
            question), multi (the same, and every question about a context is asked of one compressed cache).
        plugins: Modules of your own, or entry points of the group keepsight, that are imported first: what they add to
            METHODS can be named in `methods`.
        skip: Rows of files that make no sample, and answers that the judge gives no verdict on, at most; null skips any
            number, 0 ends the run at the first.
    """

    out: str = "???"
    bits: list[int] = field(default_factory=list)
    samples: NonNegativeInt = 20
    seed: int = 1000
    protocol: str = "reference"
    max_tokens: PositiveInt = 2048
    max_new_tokens: NonNegativeInt = 0
    judge: Judge = field(default_factory=Judge)
    question: Annotated[str, one_of("seen", "unseen", "multi")] = "seen"
    plugins: list[str] = field(default_factory=list)
    skip: NonNegativeInt | None = None


@dataclass
class Eval(TaskKeys):
    """keepsight eval: score methods and KV budgets from one prefill per sample.

        keepsight eval adapter=runs/adapter tasks=niah_single lengths=512,1024 budgets=64,128 samples=20 out=runs/eval
        keepsight eval tasks=jsonl jsonl.dir=DIR max_tokens=2048 methods=full,snapkv,lookaheadkv out=runs/real
        keepsight eval "methods=[snapkv,{name: snapkv, allocate: adakv},{name: evict, observer: short_keys}]" ...
        accelerate launch -m keepsight eval ...                    # samples divided over processes, results merged once

    A method is a name (the README has the table), or one with options: a field of the method, such as window, sinks,
    every (evict while decoding too), or a part: observer, reduce, pool, allocate. `out` gets results.jsonl (a row per
    sample, method and budget), summary.csv, report.html, plots/, tables/ and samples/, a page for each of the first
    samples with the entries that every method kept. A stopped run resumes when the same command is run again; with
    more samples, tasks, lengths, methods or budgets it is extended, and only what is missing is run.

    Attributes:
        max_batch_tokens: Most KV entries per head in one decoding batch over all variants; 0 for a quarter of the free
            memory.
        pages: Samples of each task and length whose kept tokens are stored, and shown on a page of their own.
        reuse: Folders of earlier runs. A row that depends on the same model, sample, method and options is taken from
            there instead of being measured again, its times included.
    """

    max_batch_tokens: NonNegativeInt = 0
    pages: NonNegativeInt = 1
    reuse: list[str] = field(default_factory=list)


@dataclass
class Report:
    """keepsight report: the page, plots and tables of an evaluation again, or of several as one.

        keepsight report runs/eval
        keepsight report runs/ruler runs/longbench out=runs/report

    Several runs are shown as one if they have the same model and no sample and method in common, such as tasks or
    methods that were run separately; `keepsight compare` sets runs side by side. `out` gets report.html, which needs
    no other file; samples/ with a page for each sample whose kept tokens were stored; plots/ as PNG, SVG and PDF;
    tables/ as Markdown, LaTeX and CSV; and summary.csv.

    Attributes:
        runs: Folders that keepsight eval has written.
        out: Folder for the page; by default that of the run, or runs/report for several.
    """

    POSITIONAL_LIST: ClassVar = "runs"
    runs: Annotated[list[str], NonEmpty] = field(default_factory=list)
    out: str | None = None


@dataclass
class Compare:
    """keepsight compare: evaluations side by side, with paired differences from the first.

        keepsight compare runs/adapter-a runs/adapter-b
        keepsight compare runs/seen runs/unseen 'allow=[samples]' out=runs/seen-unseen

    Rows of one task, length, method and budget stand side by side. If all runs have the same samples, differences are
    paired: their 95 % intervals come from the samples' own differences. Runs of different models or different samples
    are refused unless allow= says otherwise; then only what all have is compared, or the means alone if they have no
    sample in common. `out` gets compare.html, plots/ and tables/.

    Attributes:
        runs: Folders that keepsight eval has written, at least two.
        allow: What may differ: targets, samples.
        out: Folder for the page.
    """

    POSITIONAL_LIST: ClassVar = "runs"
    runs: Annotated[list[str], Field(min_length=2)] = field(default_factory=list)
    allow: list[Annotated[str, one_of("targets", "samples")]] = field(default_factory=list)
    out: str = "runs/compare"


@dataclass
class Inspect(UsesMethods):
    """keepsight inspect: an HTML page of the prompt tokens that a method keeps, by layer, and of the answer.

        keepsight inspect prompt=@file.txt method=lookaheadkv budget=64 out=runs/kept.html
        keepsight inspect "prompt=What is the capital of France?" method=snapkv budget=40

    Attributes:
        prompt: The user's turn as text, or @FILE.
        method: The method to look at.
        compare: The method beside it.
        budget: KV budget: entries per layer and KV head.
        options: Options of the method, such as {pool: {kernel: 5}}.
        template: Whether the chat template is applied.
        max_new_tokens: Longest answer in tokens.
        out: HTML file to write.
    """

    prompt: str = "???"
    method: str = "lookaheadkv"
    compare: str = "snapkv"
    budget: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    template: bool = True
    max_new_tokens: PositiveInt = 64
    out: str = "runs/inspect.html"


@dataclass
class Push:
    """keepsight push: upload a lookahead adapter or a head to the Hugging Face Hub.

        keepsight push runs/adapter user/smollm2-135m-lookahead --dry-run
        keepsight push runs/adapter user/smollm2-135m-lookahead --public

    Only the files of the adapter or head are uploaded, and PNG pictures beside them; links and hidden files are left
    out. The repository is private unless --public is given. The token comes from HF_TOKEN or `hf auth login`.

    Attributes:
        folder: The lookahead adapter, draft head or retrieval head.
        repo: user/name on the Hub; created if it does not exist.
        public: Create the repository as public, or push to one that is; otherwise it must be private.
        revision: Branch to push to; the repository's main one by default.
        dry_run: Print exactly what would be uploaded, and upload nothing.
    """

    POSITIONAL: ClassVar = ("folder", "repo")
    folder: str = "???"
    repo: str = "???"
    public: bool = False
    revision: str | None = None
    dry_run: bool = False


@dataclass
class Fit(DataKeys, EvalKeys):
    """keepsight fit: a lookahead module for a model in one command: data, training, evaluation, model card.

        keepsight fit HuggingFaceTB/SmolLM2-135M-Instruct out=runs/smollm2
        keepsight fit recipe=llama3.1-8b mixture=paper limit=20000 max_new_tokens=512 out=runs/llama8b
        keepsight fit recipe=demo          # the demo: SmolLM2-135M, less than ten minutes on two cores
        accelerate launch -m keepsight fit recipe=llama3.1-8b out=runs/llama8b

    `out` gets data/, adapter/ and eval/; the adapter's card shows the results of the evaluation, and `keepsight push
    DIR/adapter user/name` publishes it. A run that was stopped resumes when the same command is run again.

    Attributes:
        out: Folder for the data, the adapter and the evaluation.
        title: Title of the model card.
        base: Hub id of the base model for the card, where model.id is a folder.
        tests: Samples per task and length.
        lookahead: Shape of the lookahead module.
        train: Optimisation of the lookahead module.
        replay: How the model's outputs are stored in a training that uses each of them several times.
    """

    POSITIONAL: ClassVar = ("model.id",)
    NEEDS_MODEL: ClassVar = True
    out: str = "???"
    limit: PositiveInt = 1000
    title: str = "keepsight lookahead adapter"
    base: str | None = None
    tasks: Annotated[list[str], NonEmpty] = field(default_factory=lambda: ["niah"])
    lengths: Counts = field(default_factory=lambda: [1024])
    tests: PositiveInt = 10
    lookahead: LookaheadSettings = field(default_factory=LookaheadSettings)
    train: LookaheadTrainSettings = field(default_factory=LookaheadTrainSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)


@dataclass
class Plan(UsesModel):
    """keepsight plan: how many layers must keep their KV entries in CPU memory, for a model, a GPU and a load.

        keepsight plan recipe=llama8b memory=24GiB requests=4 budget=2048
        keepsight plan recipe=qwen3-8b memory=40GB out=runs/plan.png
        keepsight plan train recipe=llama8b tokens=16384 gpus=8 gpu=80GB

    A method that reads a few KV entries per step, chosen by a retrieval head, needs few of them on the GPU: a layer
    whose entries are in CPU memory has `budget` slots there. For each number of such layers the table gives the longest
    request that fits. The GPU also holds the weights of the model and of a retrieval head of its shape, 30 % of both
    for activations, and the head's keys. The last column is the formula of SpeContext (arXiv 2512.00722, algorithm 1,
    its line 3 corrected), which counts the head's values and repeated KV heads as well. Only the model's configuration
    is fetched, no weights; model.dtype=auto means bfloat16.

    Attributes:
        memory: GPU memory: 24GiB, 24GB or a number of bytes; by default that of this machine's GPU.
        requests: Number of concurrent requests.
        budget: KV entries that each KV head reads per token.
        out: PNG file for a plot of the table; none by default.
        retrieval_head: Variant of the retrieval head.
    """

    memory: str | None = None
    requests: PositiveInt = 1
    budget: PositiveInt = 2048
    out: str | None = None
    retrieval_head: RetrievalHeadSettings = field(default_factory=RetrievalHeadSettings)


@dataclass
class PlanTrain(UsesModel):
    """keepsight plan train: the memory and time that training a lookahead module takes, before anything is loaded.

        keepsight plan train recipe=llama3.1-8b tokens=16384 gpus=8 gpu=80GB
        keepsight plan train recipe=llama3.1-70b tokens=16384 gpus=8 gpu=80GB shard=true
        keepsight plan train recipe=llama3.1-70b model.device_map=fsdp2 tokens=16384 gpus=8 gpu=80GB
        keepsight plan train recipe=llama3.3-70b model.quantize=nf4 tokens=8192 gpu=80GB

    The step itself runs on tensors without storage, which gives its peak memory: within 10 % of what torch's allocator
    measures on small models. What a GPU's libraries and a fragmented allocator add, often one or two GiB, is not in it.
    The times divide the counted operations by an assumed share of the GPU's peak. model.dtype=auto means bfloat16.

    Attributes:
        tokens: Longest prompt in tokens.
        answer: Longest answer in tokens, at most 16384: a plan takes time for each of them.
        gpus: Number of GPUs.
        gpu: Memory of each: 80GB, 80GiB or a number of bytes.
        shard: Whether the model is sharded over the GPUs by ZeRO-3; for FSDP2 give model.device_map=fsdp2.
        samples: Samples of the whole training.
        flops: Peak of a GPU in the model's dtype, in 1e12 operations a second; an H100's in bfloat16 by default.
        utilisation: Share of the peak that is assumed to be reached.
        lookahead: Shape of the lookahead module.
        train: Optimisation of the lookahead module.
    """

    tokens: PositiveInt = 16384
    answer: Annotated[PositiveInt, Field(le=1 << 14)] = 512
    gpus: PositiveInt = 1
    gpu: str = "80GB"
    shard: bool = False
    samples: PositiveInt = 86000
    flops: Annotated[float, Field(gt=0, le=1e6)] = 989.0
    utilisation: Annotated[float, Field(gt=0, le=1)] = 0.4
    lookahead: LookaheadSettings = field(default_factory=LookaheadSettings)
    train: LookaheadTrainSettings = field(default_factory=LookaheadTrainSettings)


@dataclass
class Benched(UsesMethods):
    """Keys of benchmarks of methods.

    Attributes:
        methods: Methods, named as for `keepsight eval`.
        budgets: KV entries per head.
    """

    methods: Annotated[list[Any], NonEmpty] = field(default_factory=lambda: list(COMPARED))
    budgets: Counts = field(default_factory=lambda: [64])


@dataclass
class BenchTrain(UsesModel):
    """keepsight bench train: a training step of a lookahead module against one prefill of its batch.

        keepsight bench train train.replays=8 train.batch_size=4

    Prints seconds and peak memory of both, and how many prefills a step takes.

    Attributes:
        tokens: Prompt length in tokens.
        answer_tokens: Answer length in tokens.
        cells: Number of modules that learn from the same outputs of the model, as in an ablation.
        repeats: Timed repetitions, after one to warm up.
        lookahead: Shape of the lookahead module.
        train: Optimisation of the lookahead module.
    """

    tokens: PositiveInt = 1024
    answer_tokens: PositiveInt = 24
    cells: PositiveInt = 1
    repeats: PositiveInt = 5
    lookahead: LookaheadSettings = field(default_factory=LookaheadSettings)
    train: LookaheadTrainSettings = field(default_factory=LookaheadTrainSettings)


@dataclass
class BenchEval(Benched):
    """keepsight bench eval: the sweep of an evaluation, one prefill per sample, against one run per variant.

        keepsight bench eval tokens=1024 answer_tokens=24 samples=3

    Prints seconds per sample of both, and their ratio.

    Attributes:
        tokens: Prompt length in tokens.
        answer_tokens: Answer length in tokens.
        samples: Number of timed samples.
    """

    tokens: PositiveInt = 1024
    answer_tokens: PositiveInt = 24
    budgets: Counts = field(default_factory=lambda: [64, 128, 256])
    samples: PositiveInt = 3


@dataclass
class BenchEvict(Benched):
    """keepsight bench evict: time and memory of scoring and selecting entries, for each method, against the prefill.

        keepsight bench evict lengths=1024,4096 methods=snapkv,lookaheadkv budgets=128

    Prints for each prompt length and method: milliseconds, share of the prefill's time, peak memory, and the peak of
    the KV entries in bytes, which eviction during the prefill (`during_prefill`) keeps low. The prefill and the methods
    take turns, so that ratios are right on a machine whose speed varies.

    Attributes:
        lengths: Prompt lengths in tokens.
        repeats: Turns of the prefill and all methods, after one to warm up.
    """

    lengths: Counts = field(default_factory=lambda: [1024, 4096])
    repeats: PositiveInt = 5


@dataclass
class BenchDecode(Benched):
    """keepsight bench decode: a decoding step from the entries that each method keeps, against the full cache.

        keepsight bench decode tokens=4096 methods=snapkv,adakv,pyramidkv budgets=128

    Prints for each method: milliseconds a step, tokens per second, the ratio to the full cache's step and to that of
    the first method named, and the memory of the KV entries. Methods take turns, so that ratios are right on a machine
    whose speed varies; all caches are in memory at once. The prefill and the eviction are not timed.

    Attributes:
        tokens: Prompt length in tokens.
        batch: Batch size.
        answer_tokens: Decoding steps that are timed, after three to warm up.
    """

    tokens: PositiveInt = 4096
    budgets: Counts = field(default_factory=lambda: [128])
    batch: PositiveInt = 1
    answer_tokens: PositiveInt = 32


@dataclass
class BenchOps(Benched):
    """keepsight bench ops: operators and device syncs of each method, counted on any device as a GPU would see them.

        keepsight bench ops methods=snapkv,lookaheadkv,adakv

    Prints for each method the operators that launch work, and the syncs that wait for it, per layer, in scoring,
    selecting and gathering, and in a decoding step, beside the plain model's. Nothing is timed.

    Attributes:
        tokens: Prompt length in tokens.
    """

    tokens: PositiveInt = 512


@dataclass
class BenchSpeCache(UsesModel):
    """keepsight bench specache: a decoding step with packed KV entries, in total and by part.

        keepsight bench specache tokens=2048 bits=1

    Attributes:
        tokens: Prompt length in tokens.
        answer_tokens: Decoding steps that are timed.
        batch: Batch size.
        bits: Bits per packed value.
    """

    tokens: PositiveInt = 1024
    answer_tokens: PositiveInt = 24
    batch: PositiveInt = 1
    bits: Counts = field(default_factory=lambda: [1, 2])


@dataclass
class BenchSpeculate(UsesMethods):
    """keepsight bench speculate: speculative decoding with a draft head against plain decoding.

        keepsight bench speculate draft.head=HEAD draft.layers=null
        keepsight bench speculate draft.head=HEAD draft.layers=null data=runs/data samples=10

    Prints tokens per second of both, the acceptance length, and whether the answers are the same.

    Attributes:
        tokens: Prompt length in tokens; the longest one where prompts come from `data`.
        answer_tokens: Longest answer in tokens.
        draft_tokens: Tokens per draft.
        data: Folder made by `keepsight data`, whose last prompts are taken; needles in a haystack by default.
        samples: Number of prompts.
    """

    tokens: PositiveInt = 1024
    answer_tokens: PositiveInt = 24
    draft_tokens: PositiveInt = 5
    data: str | None = None
    samples: PositiveInt = 3


@dataclass
class BenchRetrieve(UsesMethods):
    """keepsight bench retrieve: a retrieval head's size, its decoding steps by part, and the bytes that it loads.

        keepsight bench retrieve retrieval=HEAD
        keepsight bench retrieve retrieval=null retrieval_head.features=none      # a head with random weights

    Without `retrieval=` only size and speed are measured: the entries that random weights choose say nothing.

    Attributes:
        lengths: KV entries in the cache while steps are timed; the entries are random.
        budgets: KV entries that a KV head reads per step; the largest one where steps are timed.
        batch: Batch size where steps are timed.
        repeats: Timed steps, after one to warm up.
        tokens: Length in tokens of the real texts over which loaded bytes are counted.
        samples: Number of these texts.
        answer_tokens: Decoding steps after each text.
        retrieval_head: Variant of the head with random weights.
    """

    lengths: Counts = field(default_factory=lambda: [4096, 16384, 32768])
    budgets: Counts = field(default_factory=lambda: [64, 256, 1024])
    batch: PositiveInt = 1
    repeats: PositiveInt = 5
    tokens: PositiveInt = 4096
    samples: PositiveInt = 3
    answer_tokens: PositiveInt = 24
    retrieval_head: RetrievalHeadSettings = field(default_factory=RetrievalHeadSettings)


@dataclass
class BenchDraft(UsesModel):
    """keepsight bench draft: search for the layers of a model that make a good draft.

        keepsight bench draft recipe=smollm2-135m keep=26,20 out=runs/draft
        keepsight bench draft recipe=qwen3-8b data=runs/data keep=24,18 out=runs/draft

    Removes layers one by one, always the one whose absence changes the model's answers least, and compares the subsets
    of the sizes in `keep` with the model on held-out texts. Prints a table and the line for the recipe; writes
    draft.json and draft.png to `out`. A search that was stopped resumes when the same command is run again.

    Attributes:
        out: Folder for the results.
        keep: Numbers of layers for which drafts are reported.
        data: Folder made by `keepsight data`; by default texts are made under `out`.
        mixture: Mixture of these texts: a file in recipes/mixtures/, or a path to a YAML file of your own.
        prompt_tokens: Shortest and longest prompt in tokens; longer ones in `data` are left out.
        samples: Number of texts for the search.
        held_out: Number of held-out texts for the table.
        answer_tokens: Number of tokens compared, from the start of each answer.
        seed: Random seed of the mixture's draws.
    """

    out: str = "???"
    keep: Counts = field(default_factory=lambda: [20, 16, 12])
    data: str | None = None
    mixture: str = "offline"
    prompt_tokens: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] = field(
        default_factory=lambda: [128, 512]
    )
    samples: PositiveInt = 16
    held_out: PositiveInt = 32
    answer_tokens: PositiveInt = 32
    seed: int = 0


@dataclass
class BenchHits(TaskKeys):
    """keepsight bench hits: top-k hit rate of the methods that read a part of the cache, step by step.

        keepsight bench hits retrieval=runs/retrieval tasks=niah_single lengths=2048 budgets=64,256,1024 out=runs/hits
        keepsight bench hits tasks=jsonl jsonl.dir=DIR max_tokens=4096 methods=specontext,quest,exact_topk out=runs/hits

    The full cache answers; at each token of the answer a method selects the entries that it would read. `hit` is the
    top-k hit rate: the share of the layer's k entries with the most attention that are read, k being the budget. `mass`
    is the share of the attention on the entries read, `overlap` the share of them that the step before read too.
    `best shared` reads the same entries in all layers, those with the most attention on average: no such set has a
    larger `mass`; for a retrieval head with groups of layers there is such a row by groups too. `exact_topk` selects by
    each layer's own attention. Writes hits.jsonl (a row per sample), hits.csv and hits.png to `out`. A stopped run
    resumes when the same command is run again.

    Attributes:
        methods: Methods that read a part of the cache: specontext, quest, exact_topk; with options as for keepsight
            eval.
        budgets: KV entries read per step and KV head.
        heads: Further retrieval heads under names of their own, {NAME: FOLDER_OR_HUB_ID}. A draft head is pruned first,
            with the features of the step before, and not distilled.
    """

    methods: list[Any] = field(default_factory=lambda: ["specontext", "quest", "exact_topk"])
    budgets: Counts = field(default_factory=lambda: [64, 256, 1024])
    heads: dict[str, str] = field(default_factory=dict)


COMMANDS: dict[str, tuple[type, str]] = {
    "data": (Data, "data:run"),
    "data stats": (DataStats, "data:stats"),
    "train": (Train, "train:run"),
    "finetune": (Finetune, "finetune:run"),
    "train_draft_head": (TrainDraftHead, "train_draft_head:run"),
    "train_retrieval_head": (TrainRetrievalHead, "train_retrieval_head:run"),
    "eval": (Eval, "eval:run"),
    "compare": (Compare, "report:compare"),
    "report": (Report, "report:report"),
    "inspect": (Inspect, "inspect:run"),
    "push": (Push, "report:push"),
    "plan": (Plan, "plan:run"),
    "plan train": (PlanTrain, "plan:run_training"),
    "fit": (Fit, "fit:run"),
    "bench train": (BenchTrain, "bench:train"),
    "bench eval": (BenchEval, "bench:sweep"),
    "bench evict": (BenchEvict, "bench:evict"),
    "bench decode": (BenchDecode, "bench:decode"),
    "bench ops": (BenchOps, "bench:ops"),
    "bench specache": (BenchSpeCache, "bench:specache"),
    "bench speculate": (BenchSpeculate, "bench:speculate"),
    "bench retrieve": (BenchRetrieve, "bench:retrieve"),
    "bench draft": (BenchDraft, "bench_draft:run"),
    "bench hits": (BenchHits, "bench_hits:run"),
}
"""Each command's configuration, and where the function is that runs it: MODULE:FUNCTION in this package."""
