"""Every method, observer, drafter and allocation by name; adding a row here makes it known to all commands."""

from keepsight.runtime.allocate import Adaptive, Allocation, Global, Pyramid, Uniform
from keepsight.runtime.drafting.observer import Drafter, DraftObserver
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import FullCache, Method
from keepsight.runtime.methods.dapq import ConstantText, DapQ, PromptEnds, RandomTokens
from keepsight.runtime.methods.exact_topk import ExactTopK
from keepsight.runtime.methods.kivi import Kivi
from keepsight.runtime.methods.laq import LAQ, LAQPlus, QueryCache
from keepsight.runtime.methods.llmlingua import LLMLingua2
from keepsight.runtime.methods.lookaheadkv import LookaheadKV, SoftTokens
from keepsight.runtime.methods.oracle import Oracle, OwnAnswer
from keepsight.runtime.methods.positions import (
    Earliness,
    KeyNorm,
    LaCache,
    Ladder,
    RandomEntries,
    RandomScores,
    Recency,
    ShortKeys,
    StreamingLLM,
)
from keepsight.runtime.methods.quest import Quest
from keepsight.runtime.methods.sentence_similarity import SentenceSimilarity
from keepsight.runtime.methods.specache import SpeCache
from keepsight.runtime.methods.speckv import ModelDrafter, SpecKV
from keepsight.runtime.methods.speckvpc import SpecKVPC
from keepsight.runtime.methods.specontext import SpeContext
from keepsight.runtime.methods.specpc import SpecPC
from keepsight.runtime.methods.truncation import Truncation
from keepsight.runtime.methods.window import H2O, TOVA, AdaKV, PromptWindow, PyramidKV, ReceivedAttention, SnapKV
from keepsight.runtime.observe import Observer

METHODS: dict[str, type[Method]] = {
    "full": FullCache,
    "oracle": Oracle,
    "lookaheadkv": LookaheadKV,
    "laq": LAQ,
    "laq++": LAQPlus,
    "speckv": SpecKV,
    "dapq": DapQ,
    "snapkv": SnapKV,
    "pyramidkv": PyramidKV,
    "adakv": AdaKV,
    "h2o": H2O,
    "tova": TOVA,
    "streamingllm": StreamingLLM,
    "lacache": LaCache,
    "key_norm": KeyNorm,
    "random": RandomEntries,
    "specpc": SpecPC,
    "speckvpc": SpecKVPC,
    "llmlingua2": LLMLingua2,
    "sentence_similarity": SentenceSimilarity,
    "truncation": Truncation,
    "kivi": Kivi,
    "specache": SpeCache,
    "specontext": SpeContext,
    "quest": Quest,
    "exact_topk": ExactTopK,
    "evict": Evict,
}
OBSERVERS: dict[str, type[Observer]] = {
    "soft_tokens": SoftTokens,
    "draft_tokens": DraftObserver,
    "query_cache": QueryCache,
    "prompt_window": PromptWindow,
    "received_attention": ReceivedAttention,
    "short_keys": ShortKeys,
    "recency": Recency,
    "earliness": Earliness,
    "ladder": Ladder,
    "random_scores": RandomScores,
}
DRAFTERS: dict[str, type[Drafter]] = {
    "own_answer": OwnAnswer,
    "draft_model": ModelDrafter,
    "prompt_ends": PromptEnds,
    "random_tokens": RandomTokens,
    "constant_text": ConstantText,
}
ALLOCATIONS: dict[str, type[Allocation]] = {
    "uniform": Uniform,
    "pyramidkv": Pyramid,
    "adakv": Adaptive,
    "global": Global,
}
