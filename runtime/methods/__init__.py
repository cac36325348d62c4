"""The methods: one short file a family, a registry by name, and `make_method` for names and plain options."""

from keepsight.runtime.evict import Evict
from keepsight.runtime.method import FullCache
from keepsight.runtime.methods.adakv import AdaKV
from keepsight.runtime.methods.dapq import DapQ
from keepsight.runtime.methods.exact_topk import ExactTopK
from keepsight.runtime.methods.h2o import H2O
from keepsight.runtime.methods.key_norm import KeyNorm
from keepsight.runtime.methods.kivi import Kivi
from keepsight.runtime.methods.lacache import LaCache
from keepsight.runtime.methods.laq import LAQ, LAQPlus
from keepsight.runtime.methods.llmlingua import LLMLingua2
from keepsight.runtime.methods.lookaheadkv import LookaheadKV
from keepsight.runtime.methods.make import make_method
from keepsight.runtime.methods.oracle import Oracle
from keepsight.runtime.methods.pyramidkv import PyramidKV
from keepsight.runtime.methods.quest import Quest
from keepsight.runtime.methods.random_entries import RandomEntries
from keepsight.runtime.methods.registry import DRAFTERS, METHODS, OBSERVERS
from keepsight.runtime.methods.resources import Resources
from keepsight.runtime.methods.sentence_similarity import SentenceSimilarity
from keepsight.runtime.methods.snapkv import SnapKV
from keepsight.runtime.methods.specache import SpeCache
from keepsight.runtime.methods.speckv import SpecKV
from keepsight.runtime.methods.speckvpc import SpecKVPC
from keepsight.runtime.methods.specontext import SpeContext
from keepsight.runtime.methods.specpc import SpecPC
from keepsight.runtime.methods.streamingllm import StreamingLLM
from keepsight.runtime.methods.tova import TOVA
from keepsight.runtime.methods.truncation import Truncation

__all__ = [
    "DRAFTERS",
    "H2O",
    "LAQ",
    "METHODS",
    "OBSERVERS",
    "TOVA",
    "AdaKV",
    "DapQ",
    "Evict",
    "ExactTopK",
    "FullCache",
    "KeyNorm",
    "Kivi",
    "LAQPlus",
    "LLMLingua2",
    "LaCache",
    "LookaheadKV",
    "Oracle",
    "PyramidKV",
    "Quest",
    "RandomEntries",
    "Resources",
    "SentenceSimilarity",
    "SnapKV",
    "SpeCache",
    "SpeContext",
    "SpecKV",
    "SpecKVPC",
    "SpecPC",
    "StreamingLLM",
    "Truncation",
    "make_method",
]
