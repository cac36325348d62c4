"""CPC's encoder: sentences packed into chunks, and vectors as a slow loop with bidirectional attention has them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModel, BertConfig, BertModel

from keepsight.runtime.methods import Resources, make_method
from keepsight.runtime.prompt_compression.contextual import Contextual, pack_sentences
from keepsight.runtime.prompt_compression.text import SentenceSimilarity
from tests.close import assert_close
from tests.refused import refused
from tests.runtime.prompt_compression.prompts import PROSE, text_ids, wide_model
from tests.tiny import save_tiny_target, tiny_tokenizer

SENTENCES = ["The for statement is used.", " Is the suite run again?\n", "A class definition is executed.", " No"]
QUESTION = "Which statement is run?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def adapter(folder: Path) -> Path:
    torch.manual_seed(3)
    config = LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    get_peft_model(AutoModel.from_pretrained(folder), config).save_pretrained(str(folder / "adapter"))
    return folder / "adapter"


def rotate(vector: Any, position: int, theta: float = 10_000.0) -> list[float]:
    """A head's query or key at its position (RoPE in halves)."""
    half = len(vector) // 2
    rotated = [0.0] * len(vector)
    for i in range(half):
        angle = position * theta ** (-i / half)
        real = float(vector[i])
        imaginary = float(vector[i + half])
        rotated[i] = real * math.cos(angle) - imaginary * math.sin(angle)
        rotated[i + half] = imaginary * math.cos(angle) + real * math.sin(angle)
    return rotated


def rotate_rows(vectors: torch.Tensor) -> torch.Tensor:
    """The queries or keys [T, d] of a head, each at its position."""
    return torch.tensor([rotate(vector, position) for position, vector in enumerate(vectors)]).double()


def slow_attention(config: Any, attention: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention of all tokens to all tokens, [T, D] -> [T, D], head by head."""
    size = config.head_dim
    group = config.num_attention_heads // config.num_key_value_heads
    heads = []
    for head in range(config.num_attention_heads):
        kv_head = head // group
        head_rows = slice(head * size, (head + 1) * size)
        kv_rows = slice(kv_head * size, (kv_head + 1) * size)
        queries = rotate_rows(x @ attention.q_proj.weight[head_rows].T)
        keys = rotate_rows(x @ attention.k_proj.weight[kv_rows].T)
        values = x @ attention.v_proj.weight[kv_rows].T
        weights = (queries @ keys.T / math.sqrt(size)).softmax(-1)
        heads.append(weights @ values)
    return torch.cat(heads, dim=-1) @ attention.o_proj.weight.T


def slow_hidden(model: Any, ids: list[int]) -> torch.Tensor:
    """The last hidden states [T, D] of a Llama in which every token attends to all tokens, later ones too."""

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.weight * x / (x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()

    hidden = model.embed_tokens.weight[ids].double()
    for layer in model.layers:
        hidden = hidden + slow_attention(model.config, layer.self_attn, norm(layer.input_layernorm, hidden))
        x = norm(layer.post_attention_layernorm, hidden)
        gate = torch.nn.functional.silu(x @ layer.mlp.gate_proj.weight.T)
        hidden = hidden + (gate * (x @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
    return norm(model.norm, hidden)


def encode(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=False)


def slow_vectors(model: Any, texts: list[str]) -> list[torch.Tensor]:
    """For each text the mean of its tokens' hidden states, of length 1; the texts are read as one."""
    tokens_of_texts = [encode(text) for text in texts]
    ids = []
    for tokens in tokens_of_texts:
        ids += tokens
    hidden = slow_hidden(model, ids)
    vectors = []
    start = 0
    for tokens in tokens_of_texts:
        end = start + len(tokens)
        mean = hidden[start:end].sum(dim=0) / len(tokens)
        vectors.append(mean / mean.norm())
        start = end
    return vectors


@torch.no_grad()
def slow_similarity(model: Any, chunks: list[list[str]], question: str) -> torch.Tensor:
    """The cosine of each sentence of each chunk to the question."""
    (question_vector,) = slow_vectors(model, [question])
    cosines = []
    for chunk in chunks:
        cosines += [float(vector @ question_vector) for vector in slow_vectors(model, chunk)]
    return torch.tensor(cosines)


def merge_adapter(model: Any, adapter: Path) -> None:
    """Add a LoRA adapter's updates to the weights of a model."""
    config: Any = LoraConfig.from_pretrained(str(adapter))
    assert config.lora_alpha / config.r == 3
    tensors = load_file(adapter / "adapter_model.safetensors")
    names = {tensor_name.rpartition(".lora_")[0] for tensor_name in tensors}
    for name in names:
        module = model.get_submodule(name.removeprefix("base_model.model."))
        update = tensors[f"{name}.lora_B.weight"].double() @ tensors[f"{name}.lora_A.weight"].double()
        module.weight.data += 3 * update


@pytest.mark.parametrize("adapted", [False, True])
def test_similarities_are_those_of_the_definition(folder: Path, adapter: Path, adapted: bool) -> None:
    """Of sentences in one chunk, and in two."""
    model = AutoModel.from_pretrained(folder).double()
    if adapted:
        merge_adapter(model, adapter)
    one_chunk = Contextual(str(folder), str(adapter) if adapted else None)
    assert_close(one_chunk(SENTENCES, QUESTION), slow_similarity(model, [SENTENCES], QUESTION))

    lengths = [len(encode(sentence)) for sentence in SENTENCES]
    assert sum(lengths[2:]) <= sum(lengths[:2])
    two_chunks = Contextual(one_chunk.model, one_chunk.adapter, chunk=sum(lengths[:2]))
    expected = slow_similarity(model, [SENTENCES[:2], SENTENCES[2:]], QUESTION)
    assert_close(two_chunks(SENTENCES, QUESTION), expected)


def test_an_encoder_with_a_short_context_reads_shorter_chunks(tmp_path: Path) -> None:
    torch.manual_seed(4)
    shape: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = BertModel(BertConfig(vocab_size=512, max_position_embeddings=16, **shape)).eval()
    bert.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(str(tmp_path))
    encoder = Contextual(str(tmp_path))
    assert_close(encoder(SENTENCES, QUESTION), Contextual(str(tmp_path), chunk=16)(SENTENCES, QUESTION))

    question_ids = encode(QUESTION)
    assert len(question_ids) <= 16
    with torch.no_grad():
        sentence_vector = bert(torch.tensor([encode(" No")])).last_hidden_state[0].mean(dim=0)
        question_vector = bert(torch.tensor([question_ids])).last_hidden_state[0].mean(dim=0)
    expected = torch.cosine_similarity(sentence_vector, question_vector, dim=0)
    assert_close(encoder([" No"], QUESTION)[0], expected)


@pytest.mark.parametrize(
    ("lengths", "longest", "expected"),
    [
        ([3, 2, 4], 9, [[3, 2, 4]]),
        ([3, 2, 4], 8, [[3, 2], [4]]),
        ([1, 1, 6, 1, 1, 6], 8, [[1, 1, 6], [1, 1, 6]]),
        ([5, 5, 5], 7, [[5], [5], [5]]),
        ([0, 4], 4, [[0, 4]]),
        ([0], 4, [[0]]),
    ],
)
def test_chunks_are_few_and_about_equal(lengths: list[int], longest: int, expected: list[list[int]]) -> None:
    packed = pack_sentences([[7] * length for length in lengths], longest)
    packed_lengths = [[len(sentence) for sentence in chunk] for chunk in packed]
    assert packed_lengths == expected


def test_sentences_are_kept_by_it(folder: Path, adapter: Path) -> None:
    similarity = {"name": "contextual", "model": str(folder), "adapter": str(adapter)}
    resources = Resources(tokenizer=tiny_tokenizer())
    method = make_method("sentence_similarity", 40, resources, window=12, similarity=similarity)
    assert isinstance(method, SentenceSimilarity)
    assert method.similarity == Contextual(str(folder), str(adapter))
    (short,) = method.shorten(wide_model(), text_ids(PROSE)[None])
    assert len(short) == 40
    with refused("model", "missing"):
        make_method("sentence_similarity", 40, resources, similarity="contextual")


def test_what_cannot_be_loaded_is_one_line(folder: Path, adapter: Path, tmp_path: Path) -> None:
    with refused("encoder", "file"):
        Contextual(str(tmp_path / "nothing"))(SENTENCES, QUESTION)
    with refused("adapter", "file"):
        Contextual(str(folder), str(tmp_path / "nothing"))(SENTENCES, QUESTION)
    for_causal_lm = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(wide_model(), for_causal_lm).save_pretrained(str(tmp_path / "causal_lm"))
    with refused("adapter", "model") as error:
        Contextual(str(folder), str(tmp_path / "causal_lm"))(SENTENCES, QUESTION)
    assert "\n" not in str(error.value)
