"""CPC's sentence encoder (arXiv 2409.01227): a bidirectional model reads sentences in their context."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
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
        *tokens, asked = [
            ids[:longest] for ids in tokenizer([*sentences, question], add_special_tokens=False)["input_ids"]
        ]
        vectors = [each for packed in packs(tokens, longest) for each in sentence_vectors(encoder, packed)]
        (about,) = sentence_vectors(encoder, [asked])
        return torch.stack(vectors) @ about


def packs(sentences: Sequence[list[int]], longest: int) -> list[list[list[int]]]:
    """Sentences of token ids in the smallest number of chunks of at most `longest` tokens, of about the same length.

    With n chunks, one ends with the sentence that reaches 1/n of all tokens. No sentence is longer than `longest`.
    """
    total = sum(map(len, sentences))
    for count in range(max(-(-total // longest), 1), max(total, 1) + 1):
        chunks: list[list[list[int]]] = [[]]
        for ids in sentences:
            if sum(map(len, chunks[-1])) * count >= total and chunks[-1]:
                chunks.append([])
            chunks[-1].append(ids)
        if all(sum(map(len, chunk)) <= longest for chunk in chunks):
            break
    return chunks


@torch.inference_mode()
def sentence_vectors(encoder: Any, sentences: Sequence[list[int]]) -> Tensor:
    """The vectors [S, D] float32 of sentences of token ids that are read together, on the CPU, each of length 1."""
    ids = torch.tensor([[token for each in sentences for token in each]], dtype=torch.long, device=encoder.device)
    width = ids.shape[1]
    everything = torch.zeros(1, 1, width, width, dtype=encoder.dtype, device=encoder.device)  # added to the logits
    hidden = encoder(input_ids=ids, attention_mask=everything, use_cache=False).last_hidden_state[0].float()
    ends = [*accumulate(map(len, sentences))]
    means = [hidden[start:end].sum(dim=0) / max(end - start, 1) for start, end in zip([0, *ends], ends, strict=False)]
    return normalize(torch.stack(means), dim=-1).cpu()


@lru_cache(maxsize=1)
def _loaded(model: str, adapter: str | None) -> tuple[Any, Any]:
    """Tokenizer and encoder."""
    model = at_home(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        with LOADING:
            encoder: Any = AutoModel.from_pretrained(model, trust_remote_code=False, use_safetensors=True, dtype="auto")
        encoder = encoder.to("cuda" if torch.cuda.is_available() else "cpu")
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"contextual: encoder {model!r} cannot be loaded; give a folder or Hub id: {one_line(error, 200)}"
        ) from None
    return tokenizer, (encoder if adapter is None else _adapted(encoder, adapter)).eval()


def _adapted(encoder: Any, adapter: str) -> Any:
    """The encoder with the adapter's modules in it."""
    try:
        adapter = at_home(adapter)
        config = PeftConfig.from_pretrained(adapter)
        config.task_type = None  # encoders have no head
        adapted = PeftModel(encoder, config)
        result: Any = set_peft_model_state_dict(adapted, published_tensors(adapter)[1])
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise UserError(
            f"contextual: adapter {adapter!r} cannot be loaded; give a PEFT adapter of the encoder: "
            f"{one_line(error, 200)}"
        ) from None
    if result.unexpected_keys:
        raise UserError(
            f"contextual: adapter {adapter!r} has {result.unexpected_keys[0]}, which the encoder lacks; give one that "
            "was trained on the model without its language-model head"
        )
    return adapted.get_base_model()
