"""The configurations of `keepsight prefix`, `serve` and `bench serve`; see `keepsight.commands.config`."""

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from keepsight.commands.config_bench import Benched
from keepsight.commands.config_shared import Counts, Plugins, UsesMethods, one_of

_METHOD = "model.id", "adapter", "method", "budget", "options"


@dataclass
class Evicting(Plugins, UsesMethods):
    """Keys of commands that serve one method.

    Attributes:
        method: Method that evicts; `full` serves full caches.
        budget: KV budget: entries per layer and KV head, or a ratio of the prompt such as 0.1.
        options: Options of the method, such as {pool: {kernel: 5}}.
        page: Entries per page, equal to vLLM's --block-size: all heads share the budget in whole pages. Needs vLLM with
            KEEPSIGHT_RAGGED=1. 0 for the same number of entries in every head, which works with any vLLM. With
            engine=sglang it is SGLang's --page-size, and 0 is 64.
    """

    method: str = "lookaheadkv"
    budget: int | float = 256
    options: dict[str, Any] = field(default_factory=dict)
    page: NonNegativeInt = 0


@dataclass
class Prefix(Evicting):
    """keepsight prefix: prefill documents once, and write their evicted caches for vLLM or SGLang to load.

        keepsight prefix recipe=smollm2-135m prompt=@doc.txt page=32 out=prefixes
        keepsight prefix recipe=smollm2-135m method=snapkv documents=docs.jsonl out=prefixes

    Prints for each document its id and a message with which to ask about it. A run that was stopped resumes when the
    same command is run again; several processes may write to one `out`.

    Attributes:
        prompt: A document as text, or @FILE.
        documents: JSON Lines file of documents: {"text": ...} in each row.
        out: Folder for the prefixes and their index.
        system: System message before the document; questions must send the same.
        skip: Maximum of bad rows to skip; null for no limit, 0 ends the run at the first.
        engine: vllm, or sglang: then also pages of SGLang's hierarchical cache, for keepsight.serving.sglang.Client.
    """

    COMMON: ClassVar = ("prompt", "documents", "out", *_METHOD, "page", "engine", "system", "skip")
    prompt: str | None = None
    documents: str | None = None
    out: str = "???"
    system: str | None = None
    skip: NonNegativeInt | None = None
    engine: Annotated[str, one_of("vllm", "sglang")] = "vllm"


@dataclass
class Serve(Evicting):
    """keepsight serve: serve an OpenAI-compatible API that answers requests from evicted caches, in batches.

        keepsight serve recipe=smollm2-135m budget=256 port=8000
        keepsight serve recipe=llama8b adapter=runs/a budget=256 'options={allocate: uniform}' vllm=true

    Serves /v1/chat/completions, /v1/completions, /v1/models, /health, /ready and /metrics until it is interrupted. With
    vllm=true vLLM's server answers, and a worker beside it prefills long prompts and evicts from them.

    Attributes:
        host: Address to listen on; 0.0.0.0 for all.
        port: Port to listen on; 0 for any free port.
        name: Name of the model in requests; model.id by default.
        key: Environment variable with the API key that clients must send; without it no key is required.
        open_metrics: Answer /metrics without the key too.
        rows: Maximum number of answers decoded at the same time.
        waiting: Maximum number of waiting requests; further ones get HTTP 429.
        max_prompt_tokens: Longest prompt in tokens; 0 for the model's context.
        prefill_tokens: Tokens of a new prompt that are read at a time while answers run; fewer make streams smoother
            and first tokens later. 0 reads whole prompts; null reads as many as take three times as long as a
            decoding step, and at least 256 while further prompts wait.
        sessions: Size of the states of answered prompts that are kept for later turns and the same prompts; 0 for none.
        later_turns: reread: an answer depends on its own request alone, so that later turns go on only from states of
            which nothing was evicted. continue: they go on from the evicted state, as in a Conversation, and their new
            tokens alone are read.
        max_new_tokens: Longest answer in tokens.
        max_budget: Largest budget that a request may choose by {"keepsight": {"budget": ...}}; budget by default.
        adapters: Further lookahead adapters on the same base model, such as {law: runs/law, code: runs/code}. A request
            chooses one by {"keepsight": {"adapter": "law"}}; others are evicted from by adapter.
        max_bytes: Largest request body in bytes.
        hosts: Names by which clients may call the server, such as that of a proxy, beside localhost and IP addresses;
            "*" for any. By default host and, unless that is a loopback address, this machine's name; any name where a
            key is required.
        origins: Origins of web pages that may use the server, such as https://ui.example; "*" for any.
        grace: Seconds in which running answers may end when the server is told to stop; waiting requests get HTTP 503.
        keep_alive: Seconds after which a connection without a further request is closed; more than a proxy's.
        read_timeout: Seconds in which a request must arrive.
        connections: Maximum number of connections.
        access_log: Log a line for each request.
        vllm: Start vLLM's server, and a worker that prefills long prompts for it.
        reader: Who prefills long prompts with vllm=true: worker, a process beside vLLM with a model of its own; or vllm
            itself, for methods that score entries while they are read, such as snapkv, on a CPU.
        worker_threads: Threads of the worker with vllm=true on a CPU; vLLM has the other cores. 0 for half of all, or
            fewer where OMP_NUM_THREADS says so.
        min_prompt_tokens: Shortest prompt to evict from with vllm=true; vLLM alone answers shorter ones. 0 for twice
            the budget.
        prefixes: Folder of `keepsight prefix`; vLLM's server then answers its ids too. Servers may share it.
        prefix_bytes: Size of the prefixes of long prompts that vllm=true keeps in case these come again: in memory, or
            below TMPDIR where /dev/shm has less room.
        vllm_options: Further options for vLLM's server, such as {max_model_len: 8192, gpu_memory_utilization: 0.5}.
    """

    COMMON: ClassVar = (*_METHOD, "host", "port", "name", "key", "rows", "waiting", "max_prompt_tokens", "vllm", "page")
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    name: str | None = None
    key: str = "KEEPSIGHT_API_KEY"
    open_metrics: bool = False
    rows: PositiveInt = 16
    waiting: PositiveInt = 64
    max_prompt_tokens: NonNegativeInt = 0
    prefill_tokens: NonNegativeInt | None = None
    sessions: str = "1GiB"
    later_turns: Annotated[str, one_of("reread", "continue")] = "reread"
    max_new_tokens: PositiveInt = 1024
    max_budget: int | float | None = None
    adapters: dict[str, str] = field(default_factory=dict)
    max_bytes: PositiveInt = 1 << 24
    hosts: list[str] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    grace: NonNegativeInt = 30
    keep_alive: PositiveInt = 75
    read_timeout: PositiveInt = 60
    connections: PositiveInt = 1024
    access_log: bool = False
    vllm: bool = False
    reader: Annotated[str, one_of("worker", "vllm")] = "worker"
    worker_threads: NonNegativeInt = 0
    min_prompt_tokens: NonNegativeInt = 0
    prefixes: str | None = None
    prefix_bytes: str = "2GiB"
    vllm_options: dict[str, Any] = field(default_factory=dict)


@dataclass
class BenchServe(Benched):
    """keepsight bench serve: measure the serving of many requests from evicted caches and from full ones.

        keepsight bench serve tokens=4096 requests=32 rows=16 methods=snapkv budgets=128
        keepsight bench serve servers=[stock,own,vllm,paged] workloads=[new,chats] methods=snapkv

    Uses the engine of `keepsight serve`. Prints seconds in all, requests per second, the median time to first token,
    milliseconds per decoding step with a full batch, the median and the 99th percentile of the milliseconds between two
    tokens of an answer, and the memory of the batch's entries. With vllm=true it uses vLLM's engine, and prompts are
    turned into prefixes beforehand, as by `keepsight prefix`.

    With servers= clients ask servers over HTTP, which are started one after the other and take turns. Prints requests
    per minute, seconds to the first token, milliseconds between two tokens, each as median and 99th percentile, the
    peak memory of the server's processes, the seconds in which prefixes of documents were made, and failed requests.

    Attributes:
        tokens: Prompt length in tokens.
        answer_tokens: Answer length in tokens.
        requests: Number of requests.
        rows: Maximum number of answers decoded at the same time.
        interval: Seconds between the arrivals of two requests; 0 for all at once.
        prefill_tokens: Tokens of a new prompt that are read at a time while answers run, as for `keepsight serve`; 0
            for whole prompts.
        vllm: Measure vLLM's engine.
        servers: Servers to measure, with the first of `methods` and of `budgets`: own (keepsight serve), full (the same
            from full caches), stock (vLLM alone), vllm (vllm=true, with equal heads), paged (vllm=true page=32), inside
            (vllm=true reader=vllm). A server with other keys of `keepsight serve` is {name: NAME, label: LABEL, KEY:
            VALUE}.
        workloads: What clients ask: new (prompts of half of `tokens` to `tokens`), documents (questions on a few
            documents of `tokens`), chats (of several turns, the first of `tokens`).
        clients: Number of clients, each with one request at a time; `rows` by default.
        documents: Number of documents that the requests are about.
        turns: Turns of a chat.
        rounds: How often each server has its turn.
    """

    COMMON: ClassVar = (
        *("model.id", "adapter", "methods", "budgets", "tokens", "answer_tokens", "requests", "rows"),
        *("vllm", "servers", "workloads", "rounds", "out"),
    )
    methods: Annotated[list[Any], Field(min_length=1)] = field(default_factory=lambda: ["lookaheadkv", "snapkv"])
    budgets: Counts = field(default_factory=lambda: [128])
    tokens: PositiveInt = 1024
    answer_tokens: PositiveInt = 64
    requests: PositiveInt = 16
    rows: PositiveInt = 8
    interval: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    prefill_tokens: NonNegativeInt | None = None
    vllm: bool = False
    servers: list[Any] = field(default_factory=list)
    workloads: Annotated[list[Annotated[str, one_of("new", "documents", "chats")]], Field(min_length=1)] = field(
        default_factory=lambda: ["new"]
    )
    clients: NonNegativeInt = 0
    documents: PositiveInt = 5
    turns: PositiveInt = 8
    rounds: PositiveInt = 1
