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
    shape = LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    get_peft_model(AutoModel.from_pretrained(folder), shape).save_pretrained(str(folder / "adapter"))
    return folder / "adapter"


def turned(vector: Any, place: int, theta: float = 10_000.0) -> list[float]:
    """A head's query or key at its position (RoPE in halves)."""
    half, out = len(vector) // 2, [0.0] * len(vector)
    for i in range(half):
        angle = place * theta ** (-i / half)
        one, other = float(vector[i]), float(vector[i + half])
        out[i] = one * math.cos(angle) - other * math.sin(angle)
        out[i + half] = other * math.cos(angle) + one * math.sin(angle)
    return out


def slow_hidden(model: Any, ids: list[int]) -> torch.Tensor:
    """The last hidden states [T, D] of a Llama in which every token attends to all tokens, later ones too."""
    config, hidden = model.config, model.embed_tokens.weight[ids].double()
    size, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads

    def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
        return module.weight * x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    for layer in model.layers:
        attention, x = layer.self_attn, norm(layer.input_layernorm, hidden)
        heads = []
        for head in range(config.num_attention_heads):
            own, kv = slice(head * size, (head + 1) * size), head // group
            shared = slice(kv * size, (kv + 1) * size)
            queries, keys = (x @ attention.q_proj.weight[own].T), (x @ attention.k_proj.weight[shared].T)
            values = x @ attention.v_proj.weight[shared].T
            rotated = [torch.tensor([turned(row, at) for at, row in enumerate(each)]) for each in (queries, keys)]
            weights = (rotated[0].double() @ rotated[1].double().T / math.sqrt(size)).softmax(-1)
            heads.append(weights @ values)
        hidden = hidden + torch.cat(heads, dim=-1) @ attention.o_proj.weight.T
        mlp, x = layer.mlp, norm(layer.post_attention_layernorm, hidden)
        gate = torch.nn.functional.silu(x @ mlp.gate_proj.weight.T)
        hidden = hidden + (gate * (x @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    return norm(model.norm, hidden)


@torch.no_grad()
def slow_similarity(model: Any, chunks: list[list[str]], question: str) -> list[float]:
    tokenizer = tiny_tokenizer()

    def vectors(texts: list[str]) -> list[torch.Tensor]:
        parts = [tokenizer.encode(each, add_special_tokens=False) for each in texts]
        hidden, found, start = slow_hidden(model, [token for part in parts for token in part]), [], 0
        for part in parts:
            mean = torch.stack([hidden[start + place] for place in range(len(part))]).sum(dim=0) / len(part)
            found.append(mean / mean.norm())
            start += len(part)
        return found

    (asked,) = vectors([question])
    return [float(each @ asked) for chunk in chunks for each in vectors(chunk)]


@pytest.mark.parametrize("adapted", [False, True])
def test_similarities_are_those_of_the_definition(folder: Path, adapter: Path, adapted: bool) -> None:
    model = AutoModel.from_pretrained(folder).double()
    if adapted:
        config: Any = LoraConfig.from_pretrained(str(adapter))
        assert config.lora_alpha / config.r == 3
        tensors = load_file(adapter / "adapter_model.safetensors")
        for name in {each.rpartition(".lora_")[0] for each in tensors}:
            module = model.get_submodule(name.removeprefix("base_model.model."))
            update = tensors[f"{name}.lora_B.weight"].double() @ tensors[f"{name}.lora_A.weight"].double()
            module.weight.data += 3 * update
    given = Contextual(str(folder), str(adapter) if adapted else None)
    assert_close(given(SENTENCES, QUESTION), torch.tensor(slow_similarity(model, [SENTENCES], QUESTION)))
    lengths = [len(tiny_tokenizer().encode(each, add_special_tokens=False)) for each in SENTENCES]
    small = Contextual(given.model, given.adapter, chunk=sum(lengths[:2]))
    assert sum(lengths[2:]) <= sum(lengths[:2])
    halves = slow_similarity(model, [SENTENCES[:2], SENTENCES[2:]], QUESTION)
    assert_close(small(SENTENCES, QUESTION), torch.tensor(halves))


def test_an_encoder_with_a_short_context_reads_shorter_chunks(tmp_path: Path) -> None:
    torch.manual_seed(4)
    shape: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = BertModel(BertConfig(vocab_size=512, max_position_embeddings=16, **shape)).eval()
    bert.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(str(tmp_path))
    found = Contextual(str(tmp_path))(SENTENCES, QUESTION)
    assert_close(found, Contextual(str(tmp_path), chunk=16)(SENTENCES, QUESTION))
    (ids,) = tiny_tokenizer()([" No"], add_special_tokens=False)["input_ids"]
    (asked,) = tiny_tokenizer()([QUESTION], add_special_tokens=False)["input_ids"]
    assert len(asked) <= 16
    with torch.no_grad():
        one, other = (bert(torch.tensor([each])).last_hidden_state[0].mean(dim=0) for each in (ids, asked))
    assert_close(Contextual(str(tmp_path))([" No"], QUESTION)[0], torch.cosine_similarity(one, other, dim=0))


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
    found = pack_sentences([[7] * length for length in lengths], longest)
    assert [[len(each) for each in chunk] for chunk in found] == expected


def test_sentences_are_kept_by_it(folder: Path, adapter: Path) -> None:
    part = {"name": "contextual", "model": str(folder), "adapter": str(adapter)}
    resources = Resources(tokenizer=tiny_tokenizer())
    method = make_method("sentence_similarity", 40, resources, window=12, similarity=part)
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
    headed = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(wide_model(), headed).save_pretrained(str(tmp_path / "headed"))
    with refused("adapter", "model") as caught:
        Contextual(str(folder), str(tmp_path / "headed"))(SENTENCES, QUESTION)
    assert "\n" not in str(caught.value)
