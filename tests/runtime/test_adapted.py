"""Models that their owner adapted with PEFT, compiled, or left in a training set-up."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from peft import (
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)

from keepsight import Conversation, DapQ, SnapKV, generate, load_state, save_state
from keepsight.errors import UserError
from keepsight.models.decoder import embedding_scale, input_embedding, input_shape
from keepsight.models.identity import adapters_digest, weights_digest
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.methods.drafts import ConstantText, RandomTokens
from tests.families import fresh_model
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

SMALL = SnapKV(12, window=4)
GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
IDS = prompt_ids(30)[0]
TURN = prompt_ids(6, seed=1)[0]
VIRTUAL_TOKENS = [
    PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=32),
]


@pytest.mark.parametrize("config", VIRTUAL_TOKENS, ids=lambda config: config.peft_type)
def test_virtual_tokens_are_refused_and_their_model_is_not(config: Any) -> None:
    model: Any = get_peft_model(tiny_model(), config)
    with refused("peft_type", "model"):
        model.generate(input_ids=IDS, custom_generate=SMALL, **GREEDY)
    with refused("peft_type", "model"):
        generate(model, IDS, SMALL, **GREEDY)
    with refused("peft_type", "model"):
        SMALL.compress(model, input_ids=IDS)
    with refused("peft_type", "model"):
        SMALL.start(model, IDS)
    expected = generate(tiny_model(), IDS, SMALL, **GREEDY)
    assert torch.equal(generate(model.get_base_model(), IDS, SMALL, **GREEDY), expected)
    with model.disable_adapter():
        assert torch.equal(generate(model, IDS, SMALL, **GREEDY), expected)


@pytest.fixture
def adapted() -> Any:
    """A model with two LoRAs, of which `first` is active."""
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Any = get_peft_model(tiny_model(), config, "first").eval()
    model.add_adapter("second", config)
    return model


def test_digests_tell_adapters_and_base_apart(adapted: Any) -> None:
    plain = tiny_model()
    first = adapters_digest(adapted)
    assert adapters_digest(plain) == ""
    assert weights_digest(adapted) == weights_digest(plain)
    assert adapters_digest(adapted.get_base_model()) == first
    with adapted.disable_adapter():
        assert adapters_digest(adapted) == ""
    adapted.set_adapter("second")
    assert adapters_digest(adapted) not in ("", first)
    adapted.set_adapter("first")
    assert adapters_digest(adapted) == first
    with torch.no_grad():
        adapted.get_base_model().model.layers[2].self_attn.v_proj.lora_B["first"].weight[-1, -1] += 1
    assert adapters_digest(adapted) != first


def test_a_state_is_refused_under_other_adapters(adapted: Any, tmp_path: Any) -> None:
    file = save_state(SMALL.start(adapted, IDS), tmp_path, model=adapted)
    saved = load_state(file, adapted)
    expected = generate(adapted, TURN, saved, **GREEDY)
    plain = tiny_model()
    plain_file = save_state(SMALL.start(plain, IDS), tmp_path / "plain", model=plain)
    for use in (lambda: load_state(file, adapted), lambda: generate(adapted, TURN, saved, **GREEDY)):
        adapted.set_adapter("second")
        with refused("model", "conflict"):
            use()
        with adapted.disable_adapter(), refused("model", "conflict"):
            use()
        adapted.set_adapter("first")
        use()
    assert torch.equal(generate(adapted, TURN, saved, **GREEDY), expected)
    with refused("model", "conflict"):
        load_state(file, plain)
    with refused("model", "conflict"):
        load_state(plain_file, adapted)
    with adapted.disable_adapter():
        load_state(plain_file, adapted)


def test_past_key_values_and_conversations_are_refused_under_other_adapters(adapted: Any) -> None:
    output = generate(adapted, IDS, SMALL, return_dict_in_generate=True, **GREEDY)
    longer = torch.cat([output.sequences, TURN], dim=1)
    past = {"past_key_values": output.past_key_values}
    conversation = Conversation(adapted, SMALL)
    conversation.say(IDS, **GREEDY)
    expected = generate(adapted, longer, SMALL, **past, **GREEDY)
    adapted.set_adapter("second")
    with refused("model", "conflict"):
        generate(adapted, longer, SMALL, **past, **GREEDY)
    with refused("model", "conflict"):
        conversation.say(TURN, **GREEDY)
    adapted.set_adapter("first")
    assert torch.equal(generate(adapted, longer, SMALL, **past, **GREEDY), expected)
    assert torch.equal(conversation.say(TURN, **GREEDY), expected)


def test_gradient_checkpointing_matters_in_training_mode_alone() -> None:
    expected = generate(tiny_model(), IDS, SMALL, **GREEDY)
    model = tiny_model()
    model.gradient_checkpointing_enable()
    assert torch.equal(generate(model, IDS, SMALL, **GREEDY), expected)
    conversation = Conversation(model, SMALL)
    assert torch.equal(conversation.say(IDS, **GREEDY), expected)
    model.train()
    with refused("gradient_checkpointing", "conflict"):
        generate(model, IDS, SMALL, **GREEDY)
    with refused("gradient_checkpointing", "conflict"):
        conversation.say(TURN, **GREEDY)
    model.gradient_checkpointing_disable()
    assert torch.equal(generate(model, IDS, SMALL, **GREEDY), expected)


def test_a_compiled_model_answers_as_it_does_uncompiled(tmp_path: Any) -> None:
    model = tiny_model()
    compiled: Any = torch.compile(model, backend="eager")
    conversation = Conversation(model, SMALL)
    compiled_conversation = Conversation(compiled, SMALL)
    for turn in (IDS, TURN):
        assert torch.equal(compiled_conversation.say(turn, **GREEDY), conversation.say(turn, **GREEDY))
    file = save_state(SMALL.start(compiled, IDS), tmp_path, model=compiled)
    saved = load_state(file, model)
    assert torch.equal(generate(compiled, TURN, saved, **GREEDY), generate(model, TURN, saved, **GREEDY))


def _compile_layers(model: Any, **options: Any) -> None:
    for layer in model.model.layers:
        layer.compile(**options)


def _replace_layers(model: Any, **options: Any) -> None:
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, **options)


def _compile_forward(model: Any, **options: Any) -> None:
    model.forward = torch.compile(model.forward, **options)


def _compile_attention(model: Any, **options: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.forward = torch.compile(layer.self_attn.forward, **options)


WAYS_TO_COMPILE = {
    "model.compile": lambda model, **options: model.compile(**options),
    "forward": _compile_forward,
    "decoder": lambda model, **options: model.model.compile(**options),
    "layers": _compile_layers,
    "replaced layers": _replace_layers,
    "attention": _compile_attention,
}


@pytest.mark.parametrize("way", WAYS_TO_COMPILE)
def test_parts_that_were_compiled_run_uncompiled_in_keepsight(way: str) -> None:
    """A compiler that records its graphs gets none from keepsight, in any thread, and some from the model's own use."""
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    methods = [SMALL, DapQ(12)]
    expected = [generate(tiny_model(), IDS, method, **GREEDY) for method in methods]
    torch.compiler.reset()
    model = tiny_model()
    WAYS_TO_COMPILE[way](model, backend=backend)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda method: generate(model, IDS, method, **GREEDY), methods * 3))
    for answer, expected_answer in zip(answers, expected * 3, strict=True):
        assert torch.equal(answer, expected_answer)
    assert not compiled
    plain = model.generate(IDS, **GREEDY)
    assert compiled
    assert torch.equal(plain, tiny_model().generate(IDS, **GREEDY))


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "trainable tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]},
    "LoRA": {"target_modules": ["embed_tokens", "q_proj"]},
    "LoRA of both": {"target_modules": ["embed_tokens", "lm_head"]},
    "DoRA": {"target_modules": ["embed_tokens"], "use_dora": True},
    "saved modules": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_adapted_embeddings_have_their_size(kind: str) -> None:
    config = LoraConfig(init_lora_weights=False, **EMBEDDINGS[kind])
    model: Any = get_peft_model(tiny_model(), config).eval()
    for module in model.modules():
        if hasattr(module, "trainable_tokens_delta"):
            torch.nn.init.normal_(module.trainable_tokens_delta["default"])
    ids = IDS.clone()
    ids[0, :9] = 5
    expected = model.generate(input_ids=ids, **GREEDY)[:, 30:]
    for adapted_model in (model, model.get_base_model()):
        assert input_shape(adapted_model) == (128, 32)
        assert input_embedding(adapted_model).shape == (128, 32)
        assert torch.equal(generate(adapted_model, ids, **GREEDY), expected)
        outside_vocabulary = torch.full((1, 20), 128)
        with refused("input_ids", "range"):
            generate(adapted_model, outside_vocabulary, SMALL, **GREEDY)
        for drafter in (RandomTokens(4), ConstantText([5, 6])):
            answer = generate(adapted_model, ids, DapQ(12, DraftObserver(drafter)), **GREEDY)
            assert answer.shape == (1, 5)
        lookahead = Lookahead(adapted_model, LookaheadSettings(tokens=4, rank=2))
        assert lookahead.tokens.shape == (4, 32)
    drafter = ConstantText([128])
    with pytest.raises(UserError, match="token id 128 is outside the base model's vocabulary of 128"):
        generate(model, ids, DapQ(12, DraftObserver(drafter)), **GREEDY)


def test_the_scale_of_an_adapted_embedding_is_that_of_the_plain_one() -> None:
    plain: Any = fresh_model("Gemma 3 (text)")
    scale = embedding_scale(plain)
    assert scale == pytest.approx(32**0.5)
    for kind in ("trainable tokens", "LoRA"):
        model: Any = get_peft_model(fresh_model("Gemma 3 (text)"), LoraConfig(**EMBEDDINGS[kind]))
        assert embedding_scale(model) == scale


@pytest.mark.parametrize("chunk", [-3, 0])
def test_a_prefill_in_chunks_of_nothing_is_refused(chunk: int) -> None:
    conversation = Conversation(tiny_model(), SMALL)
    conversation.say(IDS, **GREEDY)
    with refused("prefill_chunk_size", "range"):
        generate(tiny_model(), IDS, SMALL, prefill_chunk_size=chunk, **GREEDY)
    with refused("prefill_chunk_size", "range"):
        conversation.say(TURN, prefill_chunk_size=chunk, **GREEDY)
