"""The configurations of `keepsight plan` and `keepsight bench`; see `keepsight.commands.config`."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from keepsight.commands import config_shared as shared
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.train.settings import FinetuneSettings, LookaheadTrainSettings, RetrievalHeadSettings

COMPARED = ("lookaheadkv", "snapkv", "pyramidkv", "adakv", "tova", "streamingllm")
"""Methods that the benchmarks compare by default."""


@dataclass
class Plan(shared.UsesModel):
    """keepsight plan: plan how many layers must keep their KV entries in CPU memory, for a model, GPU and load.

        keepsight plan recipe=llama8b memory=24GiB requests=4 budget=2048
        keepsight plan recipe=qwen3-8b memory=40GB out=runs/plan.png
        keepsight plan train recipe=llama8b tokens=16384 gpus=8 gpu=80GB

    With a retrieval head, a step reads few KV entries: a layer whose entries are in CPU memory needs only `budget`
    slots on the GPU. For each number of such layers the table gives the longest request that fits. GPU memory also
    includes the weights of the model and of a retrieval head, 30 % of both for activations, and the head's keys. The
    last column is SpeContext's formula (arXiv 2512.00722, algorithm 1, line 3 corrected), which counts the head's
    values and repeated KV heads as well. Only the model's configuration is loaded; model.dtype=auto means bfloat16.

    Attributes:
        memory: GPU memory: 24GiB, 24GB or a number of bytes; by default that of this machine's GPU.
        requests: Number of concurrent requests.
        budget: KV entries that each KV head reads per token.
        out: PNG file for a plot of the table; none by default.
    """

    memory: str | None = None
    requests: PositiveInt = 1
    budget: PositiveInt = 2048
    out: str | None = None
    retrieval_head: RetrievalHeadSettings = field(default_factory=RetrievalHeadSettings)


@dataclass
class PlanTrain(shared.UsesModel):
    """keepsight plan train: estimate the memory and time of training a lookahead module, without loading the model.

        keepsight plan train recipe=llama3.1-8b tokens=16384 gpus=8 gpu=80GB
        keepsight plan train recipe=llama3.1-70b tokens=16384 gpus=8 gpu=80GB shard=true
        keepsight plan train recipe=llama3.1-70b model.device_map=fsdp2 tokens=16384 gpus=8 gpu=80GB
        keepsight plan train recipe=llama3.3-70b model.quantize=nf4 tokens=8192 gpu=80GB
        keepsight plan train recipe=llama3.1-8b stage=eviction finetune.gradient_checkpointing=true

    A training step runs on tensors without storage to find its peak memory, which is within 10 % of what torch's
    allocator measures on small models. GPU libraries and fragmentation need more, often one or two GiB. Times are the
    counted operations divided by an assumed share of the GPU's peak. model.dtype=auto means bfloat16.

    Attributes:
        stage: Training stage: importance (`keepsight train`) or eviction (`keepsight finetune`, the module included).
        selection: How the module selects entries: shared, paper or uniform.
        tokens: Longest prompt in tokens; by default 16384, or the model's context if it is shorter.
        answer: Longest answer in tokens, at most 16384; planning time grows with it.
        gpus: Number of GPUs.
        gpu: Memory per GPU: 80GB, 80GiB or a number of bytes.
        shard: Shard the model over the GPUs with ZeRO-3; for FSDP2 use model.device_map=fsdp2.
        samples: Number of training samples.
        flops: Peak of a GPU in the model's dtype, in TFLOP/s; an H100's in bfloat16 by default.
        utilisation: Assumed share of the peak.
    """

    stage: Annotated[str, shared.one_of("importance", "eviction")] = "importance"
    selection: shared.Selection = "shared"
    tokens: PositiveInt | None = None
    answer: Annotated[PositiveInt, Field(le=1 << 14)] = 512
    gpus: PositiveInt = 1
    gpu: str = "80GB"
    shard: bool = False
    samples: PositiveInt = 86000
    flops: Annotated[float, Field(gt=0, le=1e6)] = 989.0
    utilisation: Annotated[float, Field(gt=0, le=1)] = 0.4
    lookahead: LookaheadSettings = field(default_factory=shared.shared_selection)
    train: LookaheadTrainSettings = field(default_factory=LookaheadTrainSettings)
    finetune: FinetuneSettings = field(default_factory=FinetuneSettings)


@dataclass
class PlanTtft(shared.UsesMethods):
    """keepsight plan ttft: estimate the time to first token on a GPU, and the overhead of methods.

        keepsight plan ttft recipe=llama3.1-8b draft.id=meta-llama/Llama-3.2-1B-Instruct
        keepsight plan ttft recipe=qwen3-8b card=A100 lengths=8192,131072 measured=results/gpu.csv

    LookaheadKV's analytical model (arXiv 2603.10899, appendix B): a pass takes as long as its operations at 0.7 of the
    GPU's peak, or its bytes at 0.9 of the bandwidth. Soft tokens, draft tokens and windows have 32 tokens each. Only
    configurations are loaded; model.dtype=auto means bfloat16.

    Attributes:
        card: GPU: A100, H100, H100 NVL, H200 or B200.
        lengths: Prompt lengths in tokens.
        budget: KV entries of the cache from which LAQ generates its draft.
        measured: CSV of `make bench-gpu`, to show measured times of the same GPU and model as well; none by default.
    """

    COMMON: ClassVar = ("card", "lengths", "budget", "measured", "model.id", "draft.id", "draft.layers")
    card: str = "H100"
    lengths: shared.Counts = field(default_factory=lambda: [4096, 8192, 16384, 32768])
    budget: PositiveInt = 128
    measured: str | None = None


@dataclass
class Lengths:
    """Lengths of prompts and answers.

    Attributes:
        tokens: Prompt length in tokens.
        answer_tokens: Answer length in tokens.
    """

    tokens: PositiveInt = 1024
    answer_tokens: PositiveInt = 24


@dataclass
class KeepsRows:
    """Key of every benchmark that measures rows of a table.

    Attributes:
        out: Folder for the table as CSV and its rows as JSON Lines; none by default. A stopped run resumes there when
            the same command is run again.
    """

    out: str | None = None


@dataclass
class Benched(KeepsRows, shared.OfTable, shared.Plugins, shared.UsesMethods):
    """Keys of benchmarks of methods.

    Attributes:
        methods: Methods, named as for `keepsight eval`.
        budgets: KV entries per head.
    """

    methods: Annotated[list[Any], shared.NonEmpty] = field(default_factory=lambda: list(COMPARED))
    budgets: shared.Counts = field(default_factory=lambda: [64])


@dataclass
class BenchTrain(KeepsRows, Lengths, shared.UsesModel):
    """keepsight bench train: time a training step of a lookahead module against a prefill of the same batch.

        keepsight bench train train.replays=8 train.batch_size=4

    Prints the time and peak memory of both, and the ratio of the times.

    Attributes:
        repeats: Timed repetitions, after one warm-up.
    """

    repeats: PositiveInt = 5
    lookahead: LookaheadSettings = field(default_factory=LookaheadSettings)
    train: LookaheadTrainSettings = field(default_factory=LookaheadTrainSettings)


@dataclass
class BenchEval(Lengths, Benched):
    """keepsight bench eval: time an evaluation with one prefill per sample against separate runs of each method.

        keepsight bench eval tokens=1024 answer_tokens=24 samples=3

    Prints the seconds per sample of both, and their ratio.

    Attributes:
        samples: Number of timed samples.
    """

    budgets: shared.Counts = field(default_factory=lambda: [64, 128, 256])
    samples: PositiveInt = 3


@dataclass
class BenchEvict(Benched):
    """keepsight bench evict: measure time and memory of scoring and selecting entries, against the prefill.

        keepsight bench evict lengths=1024,4096 methods=snapkv,lookaheadkv budgets=128

    Prints for each prompt length and method: milliseconds, share of the prefill's time, peak memory, and the peak size
    of the KV entries, which eviction during the prefill (`during_prefill`) keeps low. The prefill and the methods
    take turns, so that ratios are right on a machine whose speed varies.

    Attributes:
        lengths: Prompt lengths in tokens.
        repeats: Timed repetitions, after one warm-up.
    """

    lengths: shared.Counts = field(default_factory=lambda: [1024, 4096])
    repeats: PositiveInt = 5


@dataclass
class BenchDecode(Lengths, Benched):
    """keepsight bench decode: time a decoding step from each method's evicted cache, against the full cache.

        keepsight bench decode tokens=4096 methods=snapkv,adakv,pyramidkv budgets=128

    Prints for each method: milliseconds per step, tokens per second, the ratio to the full cache's step and to that of
    the first method, and the memory of the KV entries. Methods take turns, so that ratios are right on a machine whose
    speed varies; all caches are in memory at once, unless batch=0. `selecting` is the share of a step in which entries
    are selected. `prefill s` is the prefill with its eviction, timed once, and `with prefill/s` the tokens per second
    of all rows when it counts too.

    Attributes:
        attention: Further implementations of attention with which the full cache is timed, by their names in
            transformers: eager, sdpa, flash_attention_2.
        batch: Batch size; 0 measures one method after the other, each at the largest batch that fits the free memory.
        answer_tokens: Timed decoding steps, after three for warm-up.
    """

    tokens: PositiveInt = 4096
    budgets: shared.Counts = field(default_factory=lambda: [128])
    attention: list[str] = field(default_factory=list)
    batch: NonNegativeInt = 1
    answer_tokens: PositiveInt = 32


@dataclass
class BenchOps(Benched):
    """keepsight bench ops: count the operators and device syncs of each method, on any device.

        keepsight bench ops methods=snapkv,lookaheadkv,adakv

    Prints for each method the operators that launch work and the syncs that wait for it, per layer, in scoring,
    selecting, gathering and a decoding step, and those of the plain model's decoding step. Nothing is timed.

    Attributes:
        tokens: Prompt length in tokens.
    """

    tokens: PositiveInt = 512


@dataclass
class BenchSpeCache(KeepsRows, Lengths, shared.UsesModel):
    """keepsight bench specache: time a decoding step with quantized KV entries, in total and by part.

        keepsight bench specache tokens=2048 bits=1

    The parts end with what loading from CPU memory takes: all entries, 1 % of them side by side, and 1 % of them
    scattered (SpeCache, arXiv 2503.16163, figure 2).

    Attributes:
        answer_tokens: Timed decoding steps.
        batch: Batch size.
        bits: Bits per quantized value.
    """

    batch: PositiveInt = 1
    bits: shared.Counts = field(default_factory=lambda: [1, 2])


@dataclass
class BenchSpeculate(KeepsRows, Lengths, shared.UsesMethods):
    """keepsight bench speculate: time speculative decoding with a draft head against plain decoding.

        keepsight bench speculate draft.head=HEAD draft.layers=null
        keepsight bench speculate draft.head=HEAD draft.layers=null data=runs/data samples=10

    Prints tokens per second of both, the acceptance length, and whether the answers are the same.

    Attributes:
        tokens: Prompt length in tokens; with `data`, the longest prompt.
        draft_tokens: Tokens per draft.
        data: Folder made by `keepsight data`; its last prompts are used. Needles in a haystack by default.
        samples: Number of prompts.
    """

    draft_tokens: PositiveInt = 5
    data: str | None = None
    samples: PositiveInt = 3


@dataclass
class BenchQueries(KeepsRows, shared.OfTable, shared.Benchmarks, shared.UsesModel):
    """keepsight bench queries: measure how similar the queries of pseudo tokens are to the answer's.

        keepsight bench queries tokens=2048 samples=10
        keepsight bench queries recipe=qwen3-8b data=runs/data tokens=8192 samples=100
        keepsight bench queries tasks=[jsonl] jsonl.dir=DIR by=[layer,head] out=runs/queries

    Repeats DapQ's comparison (arXiv 2603.11564, tables 1, 5 and 6, figure 2). The answer's own tokens, or random ones,
    follow the prompt at the answer's positions or at earlier ones. Prints the cosine similarity of their queries to the
    answer's, after and before RoPE, averaged over samples, layers, heads and tokens. `out` gets queries.csv and
    queries.png: its boxes are the paper's figure 2(a), its curve figure 2(b).

    Attributes:
        tokens: Prompt length in tokens; with `data` and files of `tasks`, the longest prompt.
        answer_tokens: Longest answer in tokens.
        tasks: Benchmarks or tasks whose prompts are used, as for keepsight eval. Needles in a haystack by default.
        data: Folder made by `keepsight data`; its last prompts are used.
        samples: Number of prompts, of each task if there are several.
        text: Also tokens of this text, repeated up to the answer's length.
        drawn: Also spans that begin at a position drawn below a number, {NAME: NUMBER}.
        by: Also writes the means by layer, by head, or by both, as queries_by_*.csv, and draws them by layer.
        seed: Seed of the random tokens and positions.
    """

    COMMON: ClassVar = ("out", "preset", "model.id", "tokens", "answer_tokens", "tasks", "data", "samples", "by")
    tokens: PositiveInt = 1024
    answer_tokens: PositiveInt = 32
    tasks: list[str] = field(default_factory=list)
    data: str | None = None
    samples: PositiveInt = 10
    text: str = ""
    drawn: dict[str, int] = field(default_factory=dict)
    by: list[Annotated[str, shared.one_of("layer", "head")]] = field(default_factory=list)
    seed: int = 0


@dataclass
class BenchRetrieve(KeepsRows, shared.UsesMethods):
    """keepsight bench retrieve: measure a retrieval head's size, decoding steps by part, and loaded bytes.

        keepsight bench retrieve retrieval=HEAD
        keepsight bench retrieve retrieval=null retrieval_head.features=none  # a random head

    Without `retrieval=` the head has random weights, and only size and speed are measured.

    Attributes:
        lengths: KV entries in the cache for timed steps; the entries are random.
        budgets: KV entries that a KV head reads per step; timed steps use the largest.
        batch: Batch size of timed steps.
        repeats: Timed steps, after one warm-up.
        tokens: Length in tokens of the real texts for which loaded bytes are counted.
        samples: Number of these texts.
        answer_tokens: Decoding steps after each text.
    """

    lengths: shared.Counts = field(default_factory=lambda: [4096, 16384, 32768])
    budgets: shared.Counts = field(default_factory=lambda: [64, 256, 1024])
    batch: PositiveInt = 1
    repeats: PositiveInt = 5
    tokens: PositiveInt = 4096
    samples: PositiveInt = 3
    answer_tokens: PositiveInt = 24
    retrieval_head: RetrievalHeadSettings = field(default_factory=RetrievalHeadSettings)


@dataclass
class BenchDraft(shared.UsesModel):
    """keepsight bench draft: search for the layers of a model that make a good draft.

        keepsight bench draft recipe=smollm2-135m mixture=offline keep=26,20 out=runs/draft
        keepsight bench draft recipe=qwen3-8b data=runs/data keep=24,18 out=runs/draft

    Removes layers one by one, each time the layer that changes the model's answers least. Drafts of the sizes in `keep`
    are compared with the model on held-out texts. Prints a table and the line for the recipe; writes draft.json,
    draft.csv and draft.png to `out`. A search that was stopped resumes when the same command is run again.

    Attributes:
        out: Folder for the results.
        keep: Numbers of layers for which drafts are reported.
        data: Folder made by `keepsight data`; by default texts are generated under `out`.
        mixture: Mixture of these texts: a file in recipes/mixtures/, or a path to your own YAML file.
        prompt_tokens: Shortest and longest prompt in tokens; longer ones in `data` are left out.
        samples: Number of texts for the search.
        held_out: Number of held-out texts for the table.
        answer_tokens: Number of tokens to compare, from the start of each answer.
        seed: Random seed of the texts.
    """

    out: str = "???"
    keep: shared.Counts = field(default_factory=lambda: [20, 16, 12])
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
class BenchHits(shared.OfTable, shared.TaskKeys):
    """keepsight bench hits: measure the top-k hit rate of methods that read or keep a part of the cache.

        keepsight bench hits retrieval=runs/retrieval tasks=niah_single lengths=2048 out=runs/hits
        keepsight bench hits tasks=jsonl jsonl.dir=DIR methods=specontext,quest,exact_topk out=runs/hits
        keepsight bench hits tasks=niah_single methods=[exact_topk,h2o] budgets=8,64 out=runs/hits

    The full cache answers. At each token, each method selects the entries that it would read. `hit` is the top-k hit
    rate: the share of the layer's k entries with the most attention that are read, where k is the budget. `mass` is the
    share of the attention on the entries read. `overlap` is the share of them that the previous step read too. `best
    shared` reads the same entries in all layers (or in each group of layers of a retrieval head), those with the most
    attention on average: no other such set has a larger `mass`. `exact_topk` selects by each layer's own attention.
    Methods that evict have what they keep of the prompt, and the answer so far. Writes hits.jsonl (a row per sample),
    hits.csv and hits.png to `out`. A stopped run resumes when the same command is run again.

    Attributes:
        methods: Methods that read a part of the cache (specontext, quest, exact_topk) or evict from the prompt; with
            options as for keepsight eval.
        budgets: KV entries per KV head, which are read at each step or kept from the prompt.
        heads: Further retrieval heads, or draft heads, {NAME: FOLDER_OR_HUB_ID}; see `retrieval`.
    """

    COMMON: ClassVar = (
        *(
            "out",
            "preset",
            "model.id",
            "retrieval",
            "heads",
            "tasks",
            "lengths",
            "samples",
            "methods",
            "budgets",
            "jsonl.dir",
        ),
    )
    methods: list[Any] = field(default_factory=lambda: ["specontext", "quest", "exact_topk"])
    budgets: shared.Counts = field(default_factory=lambda: [64, 256, 1024])
    heads: dict[str, str] = field(default_factory=dict)


@dataclass
class BenchImportance(shared.OfTable, shared.TaskKeys):
    """keepsight bench importance: measure how close the importance that methods predict is to that of the answer.

        keepsight bench importance tasks=niah_single methods=snapkv,dapq out=runs/importance
        keepsight bench importance tasks=jsonl jsonl.dir=DIR by=layer out=runs/importance
        keepsight bench importance preset=specpc-correlation recipe=smollm2-135m out=runs/importance

    The full cache answers. An entry's importance is the attention that it gets from the answer, mean over tokens and
    over the query heads of a KV head. `recall`: of the `budget` most important entries, the share that is among the
    `budget` that a method ranks first in the same layer and KV head. `mass`: share of the importance on those entries.
    `cosine`, `correlation` (Pearson's) and `tau` (Kendall's) compare a method's scores before pooling with the
    importance, and do not depend on the budget. For specpc the reference is the base model in the draft's role.
    Writes importance.jsonl (a row per sample, with every layer and head),
    importance.csv and importance.png to `out`. A stopped run resumes when the same command is run again.

    Attributes:
        methods: Methods that evict, or specpc; with options as for keepsight eval.
        budgets: KV entries per KV head.
        by: Also writes the means by layer, by head, or by both, as importance_by_*.csv.
    """

    COMMON: ClassVar = (
        *("out", "preset", "model.id", "adapter", "tasks", "lengths", "samples", "methods", "budgets", "by"),
        "jsonl.dir",
    )
    methods: list[Any] = field(default_factory=lambda: ["lookaheadkv", "snapkv", "dapq"])
    budgets: shared.Counts = field(default_factory=lambda: [64, 128, 256])
    by: list[Annotated[str, shared.one_of("layer", "head")]] = field(default_factory=list)
