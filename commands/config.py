"""The configuration of each command: a dataclass whose fields are the keys that the command reads.

A class's docstring is the command's help, and its `Attributes` are the help of its keys. COMMON lists the keys that the
help shows first. Keys are checked against the annotated types (pydantic's) when a command line is parsed; see
`keepsight.commands.parse`. Importing this file imports neither torch nor transformers.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt

from keepsight.commands import config_bench as benchmarks
from keepsight.commands import config_serving as serving
from keepsight.commands import config_shared as shared
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.train import settings

LOOKAHEAD_STAGES = ("answers", "importance", "eviction", "fresh_answers", "fresh_eviction", "evaluation", "card")
RETRIEVAL_STAGES = ("answers", "distillation", "evaluation", "card")


@dataclass
class Data(shared.DataKeys):
    """keepsight data: generate training data: prompts from a mixture, and the base model's answers.

        keepsight data recipe=smollm2-135m out=runs/data limit=200
        keepsight data recipe=llama8b mixture=my_mixture.yaml out=runs/data limit=20000
        keepsight data recipe=llama8b backend=server server.url=http://localhost:8000/v1 out=runs/data
        keepsight data stats runs/data

    A run that was killed resumes when the same command is run again.

    Attributes:
        out: Folder for the shards and the manifest.
        seed: Random seed for prompts and sampled answers.
        shard_size: Samples per shard.
        answers: Whose answers: mixture (responses where the mixture names some, else the base model's), model (the base
            model's alone) or source (responses alone; prompts without one are skipped).
    """

    COMMON: ClassVar = (
        *(
            "out",
            "model.id",
            "mixture",
            "answers",
            "limit",
            "max_new_tokens",
            "backend",
            "server.url",
            "skip",
            "batch_tokens",
        ),
    )
    out: str = "???"
    seed: int = 0
    shard_size: PositiveInt = 64
    answers: Annotated[str, shared.one_of("mixture", "model", "source")] = "mixture"


@dataclass
class DataStats:
    """keepsight data stats: summarise a data folder in a table and a plot.

        keepsight data stats runs/data
        keepsight data stats runs/data out=runs/lengths.png

    For each source, shows the number of samples, the shortest, median and longest prompt and answer in tokens, and the
    numbers of duplicate prompts and truncated answers.

    Attributes:
        folder: Folder made by `keepsight data`.
        out: PNG file for the plot; stats.png in the folder by default.
    """

    POSITIONAL: ClassVar = ("folder",)
    folder: str = "???"
    out: str | None = None


@dataclass
class Train(shared.CardKeys):
    """keepsight train: train a lookahead module to predict which prompt entries the model's answers attend to.

        accelerate launch train_lookahead.py recipe=smollm2-135m data=runs/data out=runs/adapter
        python train_lookahead.py data=runs/data out=runs/adapter train.steps=50 train.held_out=4
        keepsight train data=runs/data out=runs/sizes 'lookahead.tokens=[8,16]' 'lookahead.rank=[8,32]'

    Writes the adapter, its model card and training curves to `out`. A training that was stopped resumes from its last
    checkpoint when the same command is run again.

    With several values for keys of lookahead.* (tokens, rank, targets, alpha, dropout), train.* (learning_rate, clip,
    far) or max_prompt_tokens the command runs an ablation: it trains a module for every combination, one after another.
    Write values that are lists as [[qv],[all]]. `out` gets ablation.md, .tex, .csv and .png; cells/ has the adapters.

    Attributes:
        init: Adapter to start from: a folder, a Hub id or shipped:NAME; random soft tokens by default.
        max_prompt_tokens: Longest prompt in tokens; longer ones are left out. 0 for no limit.
        selection: How the module selects entries; training does not depend on it. shared: one budget for the heads of
            all layers; paper: LookaheadKV's selection; uniform: the same number of entries in every head, as serving
            engines need. Keys of lookahead.* from queries on override single values.
        timed_tokens: Prompt length in tokens at which an ablation times each module's pass, for the column overhead:
            percent of a prefill; 0 for no such column.
    """

    VARIED: ClassVar = (
        *(f"lookahead.{name}" for name in ("tokens", "rank", "targets", "alpha", "dropout")),
        *(f"train.{name}" for name in ("learning_rate", "clip", "far")),
        "max_prompt_tokens",
    )
    COMMON: ClassVar = (
        *("data", "out", "model.id", "init", "max_prompt_tokens", "lookahead.tokens", "lookahead.rank", "train.steps"),
        *("train.epochs", "train.learning_rate", "train.batch_size", "train.samples_per_step", "train.replays"),
    )
    title: str = "keepsight lookahead adapter"
    init: str | None = None
    max_prompt_tokens: NonNegativeInt = 0
    selection: shared.Selection = "shared"
    timed_tokens: NonNegativeInt = 0
    lookahead: LookaheadSettings = field(default_factory=shared.shared_selection)
    train: settings.LookaheadTrainSettings = field(default_factory=settings.LookaheadTrainSettings)


@dataclass
class Finetune(shared.Training, shared.Plugins, shared.UsesMethods):
    """keepsight finetune: fine-tune a lookahead module on the loss that evicting with it causes in answers.

        keepsight finetune recipe=smollm2-135m adapter=runs/adapter data=runs/data out=runs/finetuned
        accelerate launch -m keepsight finetune recipe=llama3.1-8b adapter=DIR data=DIR out=DIR
        keepsight finetune adapter=runs/adapter data=runs/data out=runs/finetuned max_prompt_tokens=4096
        keepsight finetune adapter=runs/adapter data=runs/data out=runs/new finetune.freeze_module=true
        keepsight finetune method=snapkv options={allocate:global} data=runs/data out=runs/weights

    The base model processes its own answer with a soft, differentiable selection of the prompt's entries. The loss is
    the KL divergence from its predictions with the full cache. It trains the soft tokens, the LoRA and one weight per
    KV head, by which the head's importance is multiplied before heads share a budget. finetune.freeze_module=true
    trains the head weights alone. Memory grows with the prompt; max_prompt_tokens= and
    finetune.gradient_checkpointing=true limit it (see `keepsight plan train stage=eviction`). selection=uniform trains
    for the same number of entries in every head, finetune.uniform_share=0.5 for both, finetune.unseen=0.3 for questions
    that come after the eviction. Other methods whose heads share a budget can have head weights too (method=). A
    training that was stopped resumes from its last checkpoint when the same command is run again.

    Attributes:
        adapter: Lookahead adapter to start from: a folder, a Hub id, or shipped:NAME.
        max_prompt_tokens: Longest prompt in tokens; longer ones are left out. 0 for no limit.
        selection: How the module selects in training and afterwards: shared, paper or uniform. The adapter's own by
            default, but if the heads of each layer share a budget, the heads of all layers share one.
        method: lookaheadkv, or another method that evicts, for which only head weights are trained.
        options: Options of the other method, such as {value_norm: true, allocate: {name: global, floor: 0.2}}.
    """

    COMMON: ClassVar = (
        *("data", "out", "adapter", "model.id", "max_prompt_tokens", "finetune.freeze_module", "finetune.budgets"),
        *("finetune.train.steps", "finetune.train.epochs", "finetune.train.learning_rate", "finetune.train.replays"),
    )
    max_prompt_tokens: NonNegativeInt = 0
    selection: shared.Selection | None = None
    method: str = "lookaheadkv"
    options: dict[str, Any] = field(default_factory=dict)
    finetune: settings.FinetuneSettings = field(default_factory=settings.FinetuneSettings)


@dataclass
class TrainDraftHead(shared.CardKeys):
    """keepsight train_draft_head: train an EAGLE-3 draft head.

        accelerate launch train_draft_head.py recipe=smollm2-135m data=runs/data out=runs/draft_head
        python train_draft_head.py data=runs/data out=runs/draft_head model.dtype=bfloat16

    Writes the head, its model card and training curves to `out`. A training that was stopped resumes from its last
    checkpoint when the same command is run again.

    Attributes:
        features: Folder in which the base model's hidden states are cached instead of running the model again. Useful
            with several epochs; takes about 4 * hidden size * 2 bytes per token.
        init: EAGLE-3 head to start from: a folder or a Hub id; a new one by default.
    """

    COMMON: ClassVar = (
        *("data", "out", "model.id", "init", "features", "draft_head.vocabulary", "draft_head.max_tokens"),
        *("draft_head.train.steps", "draft_head.train.epochs", "draft_head.train.learning_rate"),
    )
    title: str = "keepsight draft head"
    features: str | None = None
    init: str | None = None
    draft_head: settings.DraftHeadSettings = field(default_factory=settings.DraftHeadSettings)


@dataclass
class TrainRetrievalHead(shared.CardKeys):
    """keepsight train_retrieval_head: prune a draft head to a retrieval head and distil the model's attention into it.

        accelerate launch train_retrieval_head.py head=runs/head data=runs/data out=runs/retrieval
        python train_retrieval_head.py head=runs/head data=DIR out=DIR retrieval_head.features=none
        python train_retrieval_head.py head=runs/retrieval data=DIR out=DIR retrieval_head.groups=2

    Writes the head, its model card and training curves to `out`. A training that was stopped resumes from its last
    checkpoint when the same command is run again. If head= is a retrieval head, it is distilled further, also with
    more groups of layers than before.

    Attributes:
        head: Draft head to prune, or retrieval head to distil further: a folder or a Hub id; random projections by
            default.
    """

    COMMON: ClassVar = (
        *("data", "out", "model.id", "head", "retrieval_head.features", "retrieval_head.groups"),
        *("retrieval_head.max_tokens", "retrieval_head.train.steps", "retrieval_head.train.epochs"),
        "retrieval_head.train.learning_rate",
    )
    title: str = "keepsight retrieval head"
    head: str | None = None
    retrieval_head: settings.RetrievalHeadSettings = field(default_factory=settings.RetrievalHeadSettings)


@dataclass
class Eval(shared.OfTable, shared.TaskKeys):
    """keepsight eval: evaluate methods and KV budgets with one prefill per sample.

        keepsight eval adapter=runs/adapter tasks=niah lengths=512,1024 budgets=64,128 out=runs/eval
        keepsight eval tasks=jsonl jsonl.dir=DIR methods=full,snapkv,lookaheadkv out=runs/real
        keepsight eval "methods=[full,{name: evict, observer: short_keys, allocate: adakv}]" ...
        keepsight eval recipe=llama8b preset=lookaheadkv-longbench adapter=DIR draft.id=ID out=DIR
        accelerate launch -m keepsight eval ...     # divides the samples over processes

    A method is a name (see docs/methods.md), or a name with options: fields of the method such as window, sinks and
    every (evict while decoding too), or parts: observer, reduce, pool, allocate. `out` gets results.jsonl (a row per
    sample, method and budget), summary.csv, report.html, plots/, tables/ and samples/. A stopped run resumes when the
    same command is run again; with more samples, tasks, lengths, methods or budgets only missing rows are measured.

    Attributes:
        temperature: Sampling temperature of the answers; 0 decodes greedily. The draws depend on the seed and the
            prompt that is read, so they are the same for the full cache and all methods that read it whole.
        top_p: Nucleus sampling: samples from the likeliest tokens with this total probability.
        draws: Number of sampled answers to each sample, from the seeds seed, seed + 1, ...; each has a row of its own,
            and scores are means over all.
        max_batch_tokens: Maximum of KV entries per head in one decoding batch of all methods; 0 for a quarter of the
            free memory.
        pages: Samples of each task and length whose kept tokens are stored and shown on their own page.
        reuse: Folders of earlier runs. Rows with the same model, sample, method and options are copied from there,
            times included, instead of being measured again.
    """

    COMMON: ClassVar = (
        *("out", "preset", "model.id", "adapter", "tasks", "lengths", "samples", "methods", "budgets"),
        *("max_new_tokens", "question", "jsonl.dir", "reuse"),
    )
    temperature: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    draws: PositiveInt = 1
    max_batch_tokens: NonNegativeInt = 0
    pages: NonNegativeInt = 1
    reuse: list[str] = field(default_factory=list)


@dataclass
class Report:
    """keepsight report: write the page, plots and tables of an evaluation again, or of several as one.

        keepsight report runs/eval
        keepsight report runs/ruler runs/longbench out=runs/report

    Several runs are merged if they have the same model and no sample and method in common, such as tasks or methods
    that were run separately. To compare runs use `keepsight compare`. `out` gets report.html, which needs no other
    file; samples/ with a page for each sample whose kept tokens were stored; plots/ as PNG, SVG and PDF; tables/ as
    Markdown, LaTeX and CSV; and summary.csv.

    Attributes:
        runs: Folders written by `keepsight eval`.
        out: Folder for the page; by default that of the run, or runs/report for several.
    """

    POSITIONAL_LIST: ClassVar = "runs"
    runs: Annotated[list[str], shared.NonEmpty] = field(default_factory=list)
    out: str | None = None


@dataclass
class Compare:
    """keepsight compare: compare evaluations side by side, with paired differences from the first.

        keepsight compare runs/adapter-a runs/adapter-b
        keepsight compare runs/seen runs/unseen allow=samples out=runs/seen-unseen

    Compares rows of the same task, length, method and budget. If all runs have the same samples, differences are
    paired, and their 95 % intervals come from the differences per sample. Runs of different base models or samples are
    refused unless allow= permits them. Then only common samples are compared, or the means alone if there are none.
    `out` gets compare.html, plots/ and tables/.

    Attributes:
        runs: Folders written by `keepsight eval`, at least two.
        allow: What may differ: targets (base models), samples.
        out: Folder for the page.
    """

    POSITIONAL_LIST: ClassVar = "runs"
    runs: list[str] = field(default_factory=list)
    allow: list[Annotated[str, shared.one_of("targets", "samples")]] = field(default_factory=list)
    out: str = "runs/compare"


@dataclass
class Inspect(shared.Plugins, shared.UsesMethods):
    """keepsight inspect: show on an HTML page the prompt tokens that a method keeps in each layer, and its answer.

        keepsight inspect prompt=@file.txt method=lookaheadkv budget=64 out=runs/kept.html
        keepsight inspect "prompt=What is the capital of France?" method=snapkv budget=40

    Attributes:
        prompt: The user's turn as text, or @FILE.
        method: Method to inspect.
        compare: Method to compare it with.
        budget: KV budget: entries per layer and KV head.
        options: Options of the method, such as {pool: {kernel: 5}}.
        template: Whether to apply the chat template.
        max_new_tokens: Longest answer in tokens.
        out: HTML file to write.
    """

    COMMON: ClassVar = (
        *("prompt", "model.id", "method", "compare", "budget", "adapter", "options", "template", "max_new_tokens"),
        "out",
    )
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

    Uploads only the files of the adapter or head and the PNG images beside them, no links or hidden files. The
    repository is private without --public. The token comes from HF_TOKEN or `hf auth login`.

    Attributes:
        folder: Folder of the lookahead adapter, draft head or retrieval head.
        repo: user/name on the Hub; created if it does not exist.
        public: Push to a public repository, created if necessary; without it the repository must be private.
        revision: Branch to push to; the repository's main branch by default.
        dry_run: Print exactly what would be uploaded, and upload nothing.
    """

    POSITIONAL: ClassVar = ("folder", "repo")
    folder: str = "???"
    repo: str = "???"
    public: bool = False
    revision: str | None = None
    dry_run: bool = False


@dataclass
class Fit(shared.Benchmarks, shared.DataKeys, shared.EvalKeys):
    """keepsight fit: train a module for a model in one command: answers, training, evaluation, model card.

        keepsight fit HuggingFaceTB/SmolLM2-135M-Instruct out=runs/smollm2
        keepsight fit recipe=llama3.1-8b mixture=paper limit=20000 max_new_tokens=512 out=runs/llama8b
        keepsight fit recipe=smollm2-135m module=retrieval out=runs/retrieval
        keepsight fit recipe=demo          # the demo: SmolLM2-135M, 4 to 20 minutes on two cores
        accelerate launch -m keepsight fit recipe=llama3.1-8b out=runs/llama8b

    Stages of a lookahead module: answers, importance (learns what answers attend to), eviction (learns from the loss
    that eviction causes), evaluation, card. With fresh.limit=, the eviction stage goes on with new prompts before the
    evaluation (fresh_answers, fresh_eviction). Stages of a retrieval head: answers, distillation, evaluation, card.
    `keepsight push` publishes OUT/adapter or OUT/head. A run that was stopped resumes when the same command is run
    again.

    Attributes:
        out: Folder for data, modules, evaluation and card.
        module: Kind of module: lookahead or retrieval.
        stages: Stages to run; all by default.
        title: Title of the model card; "keepsight lookahead adapter" or "keepsight retrieval head" by default.
        base: Hub id of the base model for the card, if model.id is a folder.
        license: Licence of the module, as an identifier of the Hub; the base model's by default.
        data_notes: Text for the model card on the origin and licences of the data.
        methods: Names, or {name: NAME, option: value}; by default the new module's and some to compare it with.
        tests: Evaluation samples per task and length.
        selection: How a lookahead module selects entries: shared, paper or uniform; see `keepsight train`.
        max_prompt_tokens: Longest prompt in training, in tokens; longer ones are left out. 0 for no limit.
        retrieval: Retrieval head for methods that need one, or a draft head, which is pruned: a folder, a Hub id, or
            shipped:NAME.
    """

    NEEDS_MODEL: ClassVar = True
    COMMON: ClassVar = (
        *("out", "model.id", "stages", "mixture", "limit", "max_new_tokens", "backend", "server.url", "selection"),
        *("lookahead.tokens", "train.steps", "finetune.train.steps", "fresh.limit", "tasks", "tests", "methods"),
        "budgets",
    )
    out: str = "???"
    module: Annotated[str, shared.one_of("lookahead", "retrieval")] = "lookahead"
    stages: list[Annotated[str, shared.one_of(*LOOKAHEAD_STAGES, *RETRIEVAL_STAGES)]] = field(default_factory=list)
    limit: PositiveInt = 1000
    title: str = ""
    base: str | None = None
    license: str | None = None
    data_notes: str = ""
    methods: list[Any] = field(default_factory=list)
    tasks: Annotated[list[str], shared.NonEmpty] = field(default_factory=lambda: ["niah"])
    lengths: shared.Counts = field(default_factory=lambda: [1024])
    tests: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    selection: shared.Selection = "shared"
    max_prompt_tokens: NonNegativeInt = 0
    retrieval: str | None = None
    draft: shared.DraftConfig = field(default_factory=shared.DraftConfig)
    lookahead: LookaheadSettings = field(default_factory=shared.shared_selection)
    train: settings.LookaheadTrainSettings = field(default_factory=settings.LookaheadTrainSettings)
    finetune: settings.FinetuneSettings = field(default_factory=settings.FinetuneSettings)
    fresh: settings.FreshSettings = field(default_factory=settings.FreshSettings)
    retrieval_head: settings.RetrievalHeadSettings = field(default_factory=settings.RetrievalHeadSettings)
    replay: settings.ReplaySettings = field(default_factory=settings.ReplaySettings)


COMMANDS: dict[str, tuple[type, str]] = {
    "data": (Data, "data:run"),
    "data stats": (DataStats, "data:stats"),
    "train": (Train, "train:run"),
    "finetune": (Finetune, "finetune:run"),
    "train_draft_head": (TrainDraftHead, "train_heads:draft"),
    "train_retrieval_head": (TrainRetrievalHead, "train_heads:retrieval"),
    "eval": (Eval, "eval:run"),
    "compare": (Compare, "report:compare"),
    "report": (Report, "report:report"),
    "inspect": (Inspect, "inspect:run"),
    "push": (Push, "report:push"),
    "prefix": (serving.Prefix, "prefix:run"),
    "serve": (serving.Serve, "serve:run"),
    "plan": (benchmarks.Plan, "plan:run"),
    "plan train": (benchmarks.PlanTrain, "plan:run_training"),
    "plan ttft": (benchmarks.PlanTtft, "plan:run_ttft"),
    "fit": (Fit, "fit:run"),
    "bench train": (benchmarks.BenchTrain, "bench:train"),
    "bench eval": (benchmarks.BenchEval, "bench:sweep"),
    "bench evict": (benchmarks.BenchEvict, "bench:evict"),
    "bench decode": (benchmarks.BenchDecode, "bench:decode"),
    "bench serve": (serving.BenchServe, "bench:serve"),
    "bench ops": (benchmarks.BenchOps, "bench:ops"),
    "bench specache": (benchmarks.BenchSpeCache, "bench:specache"),
    "bench speculate": (benchmarks.BenchSpeculate, "bench:speculate"),
    "bench queries": (benchmarks.BenchQueries, "bench:queries"),
    "bench retrieve": (benchmarks.BenchRetrieve, "bench:retrieve"),
    "bench draft": (benchmarks.BenchDraft, "bench:draft"),
    "bench hits": (benchmarks.BenchHits, "bench_hits:run"),
    "bench importance": (benchmarks.BenchImportance, "bench_importance:run"),
}
"""Each command's configuration, and the function that runs it: MODULE:FUNCTION in this package."""
