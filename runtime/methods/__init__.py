"""The methods: a file a family, here or beside the mechanism of a family; each registers itself by name.

Modules of this folder are imported by themselves, so that a new file is a new method.
"""

from importlib import import_module as _import_module
from pkgutil import iter_modules as _iter_modules

from keepsight.runtime.drafting.speckv import SpecKV
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import FullCache
from keepsight.runtime.methods.drafts import DapQ, Oracle
from keepsight.runtime.methods.expected import ExpectedAdaKV, ExpectedAttention, TriAttention
from keepsight.runtime.methods.fastv import FastV
from keepsight.runtime.methods.geometry import CriticalAdaKV, CriticalKV, CurDKV, KeyDiff
from keepsight.runtime.methods.laq import LAQ, LAQPlus
from keepsight.runtime.methods.lookaheadkv import LookaheadKV
from keepsight.runtime.methods.make import Resources, make_method
from keepsight.runtime.methods.positions import KeyNorm, LaCache, RandomEntries, StreamingLLM
from keepsight.runtime.methods.reconstruction import KVgrad, KVzip, KVzipPlus, Reconstruction
from keepsight.runtime.methods.restore import RestoreKV
from keepsight.runtime.methods.rkv import RKV
from keepsight.runtime.methods.scored import DBTrimKV, FastKVzip, KVzap, Locret, TrimKV
from keepsight.runtime.methods.window import H2O, TOVA, AdaKV, PyramidKV, SnapKV
from keepsight.runtime.prompt_compression.r2c import R2C
from keepsight.runtime.prompt_compression.specpc import SpecKVPC, SpecPC
from keepsight.runtime.prompt_compression.text import LLMLingua2, SentenceSimilarity, Truncation
from keepsight.runtime.quantized.kivi import Kivi
from keepsight.runtime.quantized.specache import SpeCache
from keepsight.runtime.registry import DRAFTERS, METHODS, OBSERVERS
from keepsight.runtime.retrieval.specontext import SpeContext
from keepsight.runtime.sparse_read.clusterkv import ClusterKV
from keepsight.runtime.sparse_read.infllm import InfLLM
from keepsight.runtime.sparse_read.selection import ExactTopK, Quest
from keepsight.runtime.sparse_read.shadowkv import ShadowKV

for _module in _iter_modules(__path__):
    _import_module(f"{__name__}.{_module.name}")
