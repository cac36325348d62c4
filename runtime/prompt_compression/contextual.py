"""CPC's sentence encoder (arXiv 2409.01227): a bidirectional model reads sentences in their context."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from peft import PeftConfig, PeftModel, set_peft_model_state_dict
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from keepsight.errors import Positive, UserError, one_line
from keepsight.files import at_home
from keepsight.models.model_files import LOADING
from keepsight.models.scorers import published_tensors
from keepsight.runtime import registry


@registry.part("similarity", "contextual")
@dataclass(frozen=True)
class Contextual:
    """Cosine similarity of sentences in their context to the question (CPC, arXiv 2409.01227, section 3).

    Sentences are packed into the smallest number of about equal chunks. The model reads each chunk with bidirectional
    attention, and the question alone. A sentence's vector is the mean of its tokens' last hidden states, of length 1.
    CPC finds the number of chunks with equal numbers of sentences in each. Of a sentence longer than a chunk only the
    first tokens count; CPC divides it. The published weights have not been tried.

    Attributes:
        model: Folder or Hub id of the encoder, in safetensors; decoders get no causal mask.
        adapter: Folder or Hub id of a PEFT adapter of the encoder without a language-model head, such as CPC's LoRA.
        chunk: Longest chunk in the encoder's tokens; encoders with a shorter context get shorter chunks.
    """

    model: str
    adapter: str | None = None
    chunk: Positive = 6144

    def __call__(self, sentences: list[str], question: str) -> Tensor:
        """How close each sentence is to the question, [S] float32; a `UserError` if the encoder cannot be loaded."""
        tokenizer, encoder = _loaded(self.model, self.adapter)
        longest = min(self.chunk, getattr(encoder.config, "max_position_embeddings", self.chunk))
        token_ids = tokenizer([*sentences, question], add_special_tokens=False)["input_ids"]
        *sentence_ids, question_ids = [ids[:longest] for ids in token_ids]
        vectors: list[Tensor] = []
        for chunk in pack_sentences(sentence_ids, longest):
            vectors.extend(sentence_vectors(encoder, chunk))
        (question_vector,) = sentence_vectors(encoder, [question_ids])
        return torch.stack(vectors) @ question_vector


def pack_sentences(sentences: Sequence[list[int]], longest: int) -> list[list[list[int]]]:
    """Sentences of token ids in the smallest number of chunks of at most `longest` tokens, of about the same length.

    With n chunks, one ends with the sentence that reaches 1/n of all tokens. No sentence is longer than `longest`.
    """
    total = sum(map(len, sentences))
    least_chunks = max(math.ceil(total / longest), 1)
    for count in range(least_chunks, max(total, 1) + 1):
        chunks: list[list[list[int]]] = [[]]
        lengths = [0]
        for ids in sentences:
            is_full = lengths[-1] * count >= total
            if chunks[-1] and is_full:
                chunks.append([])
                lengths.append(0)
            chunks[-1].append(ids)
            lengths[-1] += len(ids)
        if max(lengths) <= longest:
            break
    return chunks


@torch.inference_mode()
def sentence_vectors(encoder: Any, sentences: Sequence[list[int]]) -> Tensor:
    """The vectors [S, D] float32 of sentences of token ids that are read together, on the CPU, each of length 1."""
    ids = torch.tensor([[*chain.from_iterable(sentences)]], dtype=torch.long, device=encoder.device)
    width = ids.shape[1]
    mask = torch.zeros(1, 1, width, width, dtype=encoder.dtype, device=encoder.device)  # hides nothing
    hidden = encoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[0].float()
    means = []
    start = 0
    for sentence in sentences:
        end = start + len(sentence)
        means.append(hidden[start:end].sum(dim=0) / max(len(sentence), 1))
        start = end
    return normalize(torch.stack(means), dim=-1).cpu()


@lru_cache(maxsize=1)
def _loaded(model: str, adapter: str | None) -> tuple[Any, Any]:
    """Tokenizer and encoder."""
    model = at_home(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        with LOADING:
            encoder: Any = AutoModel.from_pretrained(model, trust_remote_code=False, use_safetensors=True, dtype="auto")
        if torch.cuda.is_available():
            encoder = encoder.to("cuda")
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"contextual: encoder {model!r} cannot be loaded; give a folder or Hub id: {one_line(error, 200)}",
            field="encoder",
            code="file",
        ) from None
    if adapter is not None:
        encoder = _with_adapter(encoder, adapter)
    return tokenizer, encoder.eval()


def _with_adapter(encoder: Any, adapter: str) -> Any:
    """The encoder with the adapter's modules in it."""
    try:
        adapter = at_home(adapter)
        config = PeftConfig.from_pretrained(adapter)
        config.task_type = None  # encoders have no head
        adapted = PeftModel(encoder, config)
        _, tensors = published_tensors(adapter)
        loaded: Any = set_peft_model_state_dict(adapted, tensors)
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise UserError(
            f"contextual: adapter {adapter!r} cannot be loaded; give a PEFT adapter of the encoder: "
            f"{one_line(error, 200)}",
            field="adapter",
            code="file",
        ) from None
    if loaded.unexpected_keys:
        raise UserError(
            f"contextual: adapter {adapter!r} has {loaded.unexpected_keys[0]}, which the encoder lacks; give one that "
            "was trained on the model without its language-model head",
            field="adapter",
            code="model",
        )
    return adapted.get_base_model()
