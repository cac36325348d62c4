"""The methods: a file a family, here or beside the mechanism of a family; each registers itself by name.

Modules of this folder are imported by themselves, so that a new file is a new method.
"""

from importlib import import_module as _import_module
from pkgutil import iter_modules as _iter_modules

from keepsight.runtime.drafting.speckv import SpecKV as SpecKV
from keepsight.runtime.evict import Evict as Evict
from keepsight.runtime.generate import FullCache as FullCache
from keepsight.runtime.methods.drafts import DapQ as DapQ
from keepsight.runtime.methods.drafts import Oracle as Oracle
from keepsight.runtime.methods.expected import ExpectedAdaKV as ExpectedAdaKV
from keepsight.runtime.methods.expected import ExpectedAttention as ExpectedAttention
from keepsight.runtime.methods.expected import TriAttention as TriAttention
from keepsight.runtime.methods.fastv import FastV as FastV
from keepsight.runtime.methods.geometry import CriticalAdaKV as CriticalAdaKV
from keepsight.runtime.methods.geometry import CriticalKV as CriticalKV
from keepsight.runtime.methods.geometry import CurDKV as CurDKV
from keepsight.runtime.methods.geometry import KeyDiff as KeyDiff
from keepsight.runtime.methods.laq import LAQ as LAQ
from keepsight.runtime.methods.laq import LAQPlus as LAQPlus
from keepsight.runtime.methods.lookaheadkv import LookaheadKV as LookaheadKV
from keepsight.runtime.methods.make import Resources as Resources
from keepsight.runtime.methods.make import make_method as make_method
from keepsight.runtime.methods.positions import KeyNorm as KeyNorm
from keepsight.runtime.methods.positions import LaCache as LaCache
from keepsight.runtime.methods.positions import RandomEntries as RandomEntries
from keepsight.runtime.methods.positions import StreamingLLM as StreamingLLM
from keepsight.runtime.methods.reconstruction import KVgrad as KVgrad
from keepsight.runtime.methods.reconstruction import KVzip as KVzip
from keepsight.runtime.methods.reconstruction import KVzipPlus as KVzipPlus
from keepsight.runtime.methods.reconstruction import Reconstruction as Reconstruction
from keepsight.runtime.methods.restore import RestoreKV as RestoreKV
from keepsight.runtime.methods.rkv import RKV as RKV
from keepsight.runtime.methods.scored import DBTrimKV as DBTrimKV
from keepsight.runtime.methods.scored import FastKVzip as FastKVzip
from keepsight.runtime.methods.scored import KVzap as KVzap
from keepsight.runtime.methods.scored import Locret as Locret
from keepsight.runtime.methods.scored import TrimKV as TrimKV
from keepsight.runtime.methods.window import H2O as H2O
from keepsight.runtime.methods.window import TOVA as TOVA
from keepsight.runtime.methods.window import AdaKV as AdaKV
from keepsight.runtime.methods.window import PyramidKV as PyramidKV
from keepsight.runtime.methods.window import SnapKV as SnapKV
from keepsight.runtime.prompt_compression.r2c import R2C as R2C
from keepsight.runtime.prompt_compression.specpc import SpecKVPC as SpecKVPC
from keepsight.runtime.prompt_compression.specpc import SpecPC as SpecPC
from keepsight.runtime.prompt_compression.text import LLMLingua2 as LLMLingua2
from keepsight.runtime.prompt_compression.text import SentenceSimilarity as SentenceSimilarity
from keepsight.runtime.prompt_compression.text import Truncation as Truncation
from keepsight.runtime.quantized.kivi import Kivi as Kivi
from keepsight.runtime.quantized.specache import SpeCache as SpeCache
from keepsight.runtime.registry import DRAFTERS as DRAFTERS
from keepsight.runtime.registry import METHODS as METHODS
from keepsight.runtime.registry import OBSERVERS as OBSERVERS
from keepsight.runtime.retrieval.specontext import SpeContext as SpeContext
from keepsight.runtime.sparse_read.clusterkv import ClusterKV as ClusterKV
from keepsight.runtime.sparse_read.infllm import InfLLM as InfLLM
from keepsight.runtime.sparse_read.selection import ExactTopK as ExactTopK
from keepsight.runtime.sparse_read.selection import Quest as Quest
from keepsight.runtime.sparse_read.shadowkv import ShadowKV as ShadowKV

for _module in _iter_modules(__path__):
    _import_module(f"{__name__}.{_module.name}")
