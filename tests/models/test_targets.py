"""Loading targets from folders, every way in which that goes wrong, and which models are supported."""

import itertools
import json
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from keepsight.errors import Code, UserError
from keepsight.files import read_json, write_json
from keepsight.models import model_files
from keepsight.models.card import Provenance
from keepsight.models.chat import chat_text
from keepsight.models.decoder import context_of, require_supported
from keepsight.models.identity import Identity, folder_version, record_version, template_digest, version_of
from keepsight.models.lookahead import Lookahead, LookaheadAdapter
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.model_files import dequantised_folder, installed_file, located, published_name
from keepsight.models.targets import load_target
from keepsight.runtime.generate import generate
from keepsight.runtime.methods import LookaheadKV, Resources, make_method
from keepsight.runtime.methods.drafts import DapQ
from keepsight.runtime.methods.window import SnapKV
from keepsight.runtime.prompt_compression.text import Truncation
from tests.families import fresh_model
from tests.refused import refused
from tests.tiny import FAMILIES, prompt_ids, save_tiny_target, tiny_model, tiny_tokenizer

HUB_ID = "ada/not-there"
INFINITE = {"rope_type": "default", "rope_theta": float("inf")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(saved, tmp_path / "target"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An importable package with a model file, which must not be imported."""
    path = tmp_path / "site" / "tiny_packaged"
    path.mkdir(parents=True)
    (path / "__init__.py").write_text("raise SystemExit('imported')")
    (path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(path.parent))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_loaded_frozen_and_pads_on_the_left(tmp_path: Path, family: str) -> None:
    target = load_target(str(save_tiny_target(tmp_path, family)))
    assert target.name == str(tmp_path)
    assert target.model.config.name_or_path == str(tmp_path)
    assert target.version.startswith("sha256:")
    assert not target.model.training
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.model.dtype == (torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    assert target.tokenizer.padding_side == "left"
    assert (target.end_tokens, target.pad_token) == ([2], 0)
    assert target.identity == Identity(model=target.version, template=template_digest(tiny_tokenizer()))


def test_bent_logits_are_loaded_with_an_attention_that_bends_them(tmp_path: Path) -> None:
    """Gemma 2's: transformers' sdpa, its default up to 5.18, leaves softcaps out."""
    fresh_model("Gemma 2").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(str(tmp_path))
    target = load_target(str(tmp_path), device="cpu")
    assert target.model.config._attn_implementation == "eager"


def test_threads_that_load_at_the_same_time_leave_weights_tied(tmp_path: Path) -> None:
    """transformers switches tying off for the whole process while it loads, and two that overlapped left it off."""
    folder = str(save_tiny_target(tmp_path / "tied", tie_word_embeddings=True))
    for _ in range(3):
        with ThreadPoolExecutor(4) as pool:
            models = [*pool.map(lambda _: load_target(folder, device="cpu").model, range(4))]
        for model in models:
            assert model.lm_head.weight is model.model.embed_tokens.weight
    assert PreTrainedModel.tie_weights.__name__ == "tie_weights"


def test_a_tokenizer_without_special_tokens_pads_with_the_models_end(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for name in ("pad_token", "eos_token"):
        del settings[name]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    target = load_target(str(folder))
    assert target.tokenizer.pad_token_id is None
    assert target.pad_token == target.end_tokens[0] == 2


def edit(**changes: Any) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return spoil


def cut(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1000])


def with_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def in_a_folder(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").mkdir()


def a_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    save_file({}, folder / "model.safetensors", metadata={"format": "pt"})


def as_shards(*names: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        index = {"metadata": {}, "weight_map": {f"tensor.{name}": name for name in names}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return spoil


def an_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


SPOILED: dict[str, tuple[Callable[[Path], object], str, Code]] = {
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "weights", "missing"),
    "cut weights": (cut, "model.id", "file"),
    "broken configuration": (lambda folder: (folder / "config.json").write_text("{"), "config.json", "file"),
    "a pickle beside a decoy": (a_pickle, "model.id", "file"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "model.id", "file"),
    "missing layer": (edit(num_hidden_layers=4), "model.id", "file"),
    "no end": (
        lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": []}'),
        "eos_token_id",
        "type",
    ),
    "weights that are not finite": (with_nan, "model.norm.weight", "data"),
    "a folder in place of tokenizer settings": (in_a_folder, "tokenizer_config.json", "file"),
    "damaged tokenizer": (lambda folder: (folder / "tokenizer.json").write_text('{"a" 1}'), "model.id", "file"),
    "other shape": (edit(intermediate_size=48), "model.id", "file"),
    "an adapter": (an_adapter, "config.json", "missing"),
    "a missing shard": (
        as_shards("model-1.safetensors", "model-2.safetensors"),
        "weights",
        "missing",
    ),
    "a shard elsewhere": (as_shards("../target/model-1.safetensors"), "weights", "missing"),
    "NaN": (edit(rms_norm_eps=float("nan")), "rms_norm_eps", "data"),
    "infinite": (
        edit(rope_parameters=INFINITE),
        "rope_parameters.rope_theta",
        "data",
    ),
    "deep": (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json", "file"),
    "deep tokenizer": (lambda folder: (folder / "tokenizer_config.json").write_text("[" * 100_000), "model.id", "file"),
    "unsupported": (edit(model_type="recurrent_gemma"), "model", "model"),
    "an encoder": (edit(model_type="t5", is_encoder_decoder=True), "model", "model"),
}


NEED_WEIGHTS = (
    "cut weights",
    "a pickle beside a decoy",
    "missing layer",
    "no end",
    "weights that are not finite",
    "other shape",
)
"""What only the weights show; all else is refused before they are read."""


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_folder_is_an_error_of_one_line(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, field, code = SPOILED[name]
    spoil(folder)
    if name not in NEED_WEIGHTS:
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("read the weights"))
    with refused(field, code):
        load_target(str(folder))


@pytest.mark.parametrize(
    ("options", "field", "code"),
    [
        ({"dtype": "int8"}, "model.dtype", "unknown"),
        ({"device": "abacus"}, "model.device", "unknown"),
        ({"attention": "spda"}, "model.attention", "unknown"),
        ({"attention": "flash_attention_3"}, "model.attention", "missing"),
        ({"template": {"x": None}}, "model.template", "type"),
        ({"template": {"x": "\ud800"}}, "model.template", "type"),
        ({"template": {"x": float("nan")}}, "model.template", "type"),
    ],
)
def test_unknown_values_are_named_before_weights_are_read(
    folder: Path, options: dict[str, Any], field: str, code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("read the weights"))
    with refused(field, code):
        load_target(str(folder), **options)


@pytest.mark.parametrize("model_id", ["./not/there", "two words"])
def test_neither_a_folder_nor_a_hub_id(model_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "hub_answers", lambda: pytest.fail("the Hub was asked"))
    with refused("model.id", "unknown"):
        load_target(model_id)
    with refused("model.id", "file"):
        load_target(__file__)


@pytest.mark.usefixtures("offline")
def test_a_packaged_file_needs_its_package(package: Path) -> None:
    with refused("model.id", "missing"):
        load_target(HUB_ID)
    with refused("packaged", "missing"):
        load_target(HUB_ID, packaged="not_installed/model.gguf")
    for name in ("tiny_packaged/other.gguf", "tiny_packaged/../tiny_packaged/model.gguf", "", "/", ".x/y", "a.b/c"):
        assert installed_file(name) is None
    assert installed_file("tiny_packaged/model.gguf") == package / "model.gguf"


def test_an_installed_packaged_file_is_used_in_place_of_the_hubs_weights(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any machine, so that the numbers of README are those of its commands; a revision names weights on the Hub."""
    monkeypatch.setattr(model_files, "hub_answers", lambda: True)
    monkeypatch.setattr(model_files, "dequantised", lambda path, digest: (path, digest))
    packaged = "tiny_packaged/model.gguf"
    assert located(HUB_ID, packaged=packaged, packaged_digest="x") == (package / "model.gguf", "x", {})
    for options in ({"revision": "v1", "packaged": packaged}, {"packaged": "not_installed/model.gguf"}, {}):
        options_of_hub = {"revision": options.get("revision"), "local_files_only": False}
        assert located(HUB_ID, **options) == (HUB_ID, None, options_of_hub)


@pytest.mark.usefixtures("offline")
def test_a_file_in_parts_is_read_from_the_cache_by_its_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KEEPSIGHT_CACHE", str(tmp_path / "cache"))
    digest = f"sha256:{'0123456789abcdef' * 4}"
    options: dict[str, Any] = {"packaged": ["a==1/a/0.bin", "b==1/b/1.bin"], "packaged_digest": digest}
    with refused("model.id", "missing"):
        load_target(HUB_ID, **options)
    save_tiny_target(dequantised_folder(digest))
    target = load_target(HUB_ID, device="cpu", **options)
    assert (target.version, target.name) == (digest, HUB_ID)
    with refused("model.id", "missing"):
        load_target(HUB_ID, revision="v1", **options)


@pytest.mark.usefixtures("offline", "package")
def test_a_packaged_file_needs_its_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KEEPSIGHT_CACHE", str(tmp_path / "cache"))
    with refused("model.gguf", "file"):
        load_target(HUB_ID, packaged="tiny_packaged/model.gguf", packaged_digest="sha256:00")
    assert not (tmp_path / "cache").exists()


def test_the_chat_template_and_what_it_refuses() -> None:
    tokenizer = tiny_tokenizer()
    turns = [{"role": "user", "content": "Hello?"}]
    assert chat_text(tokenizer, turns) == "<|user|>Hello?<|end|><|assistant|>"
    for template in ("{{ raise_exception('no system turn') }}", "{{ 1 // 0 }}"):
        tokenizer.chat_template = template
        with refused("messages", "data"):
            chat_text(tokenizer, turns)
    tokenizer.chat_template = None
    with refused("model.chat_template", "missing"):
        chat_text(tokenizer, turns)


def test_arguments_of_the_chat_template_go_with_the_target(tmp_path: Path) -> None:
    folder = save_tiny_target(tmp_path)
    tokenizer = tiny_tokenizer()
    quiet_start = "{% if enable_thinking is defined and not enable_thinking %}quiet {% endif %}"
    tokenizer.chat_template = f"{quiet_start}{tokenizer.chat_template}"
    tokenizer.save_pretrained(str(folder))
    turns = [{"role": "user", "content": "Hello"}]
    default = load_target(str(folder))
    quiet = load_target(str(folder), template={"enable_thinking": False})
    assert chat_text(quiet.tokenizer, turns) == "quiet " + chat_text(default.tokenizer, turns)
    assert quiet.identity.template != default.identity.template
    assert load_target(str(folder), template={}).identity == default.identity


def test_a_version_is_of_the_content(saved, folder):
    assert folder_version(folder) == folder_version(saved)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name] + 1e-4}, folder / "model.safetensors", metadata={"format": "pt"})
    assert (folder / "model.safetensors").stat().st_size == (saved / "model.safetensors").stat().st_size
    assert folder_version(folder) != folder_version(saved)
    shutil.copy(saved / "model.safetensors", folder)
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", config | {"transformers_version": "0", "dtype": "bfloat16"})
    assert folder_version(folder) == folder_version(saved)
    write_json(folder / "config.json", config | {"rms_norm_eps": 0.5})
    assert folder_version(folder) != folder_version(saved)


def test_a_quantised_model_is_another():
    model = tiny_model()
    record_version(model, "sha256:1")
    assert version_of(model) == "sha256:1"
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert version_of(model) == "sha256:1 quantised by bitsandbytes 4bit"
    record_version(model, None)
    assert version_of(model) is None


def test_an_adapter_on_other_weights_gets_one_line_that_names_both(folder, tmp_path, caplog):
    target = load_target(str(folder), device="cpu")
    module = Lookahead(target.model, LookaheadSettings(tokens=4, rank=2))
    module.adapter().save(tmp_path / "adapter", Provenance(target.name, target.identity), "# Card\n")
    artifact = LookaheadAdapter.load(tmp_path / "adapter")
    same = load_target(str(folder), device="cpu").model
    with caplog.at_level(logging.WARNING, "keepsight"), artifact.attached(same):
        pass
    assert caplog.messages == []
    other = save_tiny_target(tmp_path / "other")
    tensors = {name: tensor * 1.01 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    changed = load_target(str(other), device="cpu")
    for _ in range(2):  # one line for both
        with artifact.attached(changed.model):
            pass
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / 'adapter'} was trained for {target.name} with another base model (")
    assert f"(recorded: {target.version[:19]}, at hand: {changed.version[:19]}): evaluate it again" in message


def add_token(tokenizer):
    tokenizer.add_tokens(["<|extra|>"])


def replace_template(tokenizer):
    tokenizer.chat_template = "{{ messages }}"


def change_nothing(tokenizer):
    pass


@pytest.mark.parametrize(
    ("loaded_by", "change", "differs"),
    [
        ("from_pretrained", add_token, True),
        ("make_method", replace_template, True),
        ("make_method", change_nothing, False),
    ],
)
def test_an_adapter_of_other_prompts_gets_one_line(tmp_path, caplog, loaded_by, change, differs):
    tokenizer = tiny_tokenizer()
    provenance = Provenance("ada/tiny", Identity(template=template_digest(tokenizer)))
    folder = tmp_path / "adapter"
    Lookahead(tiny_model(), LookaheadSettings(tokens=4, rank=2)).adapter().save(folder, provenance, "# Card\n")
    change(tokenizer)
    with caplog.at_level(logging.WARNING, "keepsight"):
        for budget in (8, 9):
            if loaded_by == "from_pretrained":
                LookaheadKV.from_pretrained(folder, budget, tokenizer=tokenizer)
            else:
                make_method("lookaheadkv", budget, Resources(folder, tokenizer=tokenizer, target=tiny_model()))
    if differs:
        (message,) = caplog.messages
        assert message.startswith(f"{folder} was trained with another tokenizer or chat template (recorded: sha256:")
    else:
        assert caplog.messages == []


SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
INTERFACE = "does not compute attention by transformers' AttentionInterface"
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "bert": ({"is_decoder": True}, INTERFACE),
    "falcon": ({}, INTERFACE),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, INTERFACE),
    "bart": ({"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4}, "is an encoder-decoder model"),
    "recurrent_gemma": ({"head_dim": 8, "lru_width": 32, "attention_window_size": 16}, "has its own kind of cache"),
    "diffllama": ({}, "shares its KV heads among query heads in its own way"),
    "jetmoe": ({"num_local_experts": 2, "num_experts_per_tok": 2, "kv_channels": 8}, "in its own way"),
    "doge": ({}, "computes the mask of each head from the values"),
    "mamba": ({}, "has no attention, and so no KV entries"),
    "minimax": ({"num_local_experts": 2, "head_dim": 8, "block_size": 8}, "has its own kind of cache"),
}


def unsupported_model(model_type: str) -> Any:
    changes, _ = UNSUPPORTED[model_type]
    config = AutoConfig.for_model(model_type, **SMALL | changes)
    return AutoModelForCausalLM.from_config(config).eval()


METHODS = [None, SnapKV(16, window=8), DapQ(16), Truncation(16)]


@pytest.mark.parametrize(("model_type", "method"), [*zip(UNSUPPORTED, itertools.cycle(METHODS), strict=False)], ids=str)
def test_unsupported_models_are_refused_in_one_line(model_type, method):
    model = unsupported_model(model_type)
    ids, _ = prompt_ids(41)
    with pytest.raises(UserError) as error:
        generate(model, ids, method, max_new_tokens=2)
    message = str(error.value)
    assert error.value.code == "model"
    assert "\n" not in message
    assert model_type in message


def test_encoders_are_refused():
    config = AutoConfig.for_model("t5", vocab_size=128, d_model=32, num_heads=4, d_kv=8, num_layers=1, d_ff=32)
    with refused("model", "model"):
        require_supported(AutoModelForSeq2SeqLM.from_config(config))


def test_layers_on_several_devices_are_refused():
    model = tiny_model()
    model.model.layers[1].to("meta")
    ids, _ = prompt_ids(20)
    with refused("model.device_map", "model"):
        generate(model, ids, max_new_tokens=2)


def test_yarn_stretches_the_context():
    """transformers runs such models beyond `max_position_embeddings`, and so does keepsight."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    model = tiny_model(max_position_embeddings=32, rope_parameters=rope)
    assert context_of(model) == 128
    ids, _ = prompt_ids(60)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)[:, 60:]
    assert torch.equal(generate(model, ids, SnapKV(60, window=8), max_new_tokens=4), expected)
    assert generate(model, ids, DapQ(16), max_new_tokens=4).shape == (1, 4)
    long_ids, _ = prompt_ids(100)
    with refused("prompt", "range"):
        generate(model, long_ids, DapQ(16), max_new_tokens=4)


LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
CONTEXTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "default": (4096, DEFAULT, 4096),
    "linear": (4096, LINEAR, 16384),
    "linear of an original": (16384, LINEAR | {"original_max_position_embeddings": 4096}, 16384),
    "dynamic": (4096, LINEAR | {"rope_type": "dynamic"}, 16384),
    "yarn": (4096, LINEAR | {"rope_type": "yarn", "original_max_position_embeddings": 4096}, 16384),
    "yarn, extended": (16384, LINEAR | {"rope_type": "yarn", "original_max_position_embeddings": 4096}, 16384),
    "llama3": (131072, LLAMA3 | {"original_max_position_embeddings": 8192}, 131072),
    "longrope, extended": (131072, LONGROPE | {"original_max_position_embeddings": 4096}, 131072),
    "longrope": (4096, LONGROPE | {"factor": 32.0, "original_max_position_embeddings": 4096}, 131072),
}


@pytest.mark.parametrize("kind", CONTEXTS)
def test_every_kind_of_rope_stretches_the_context(kind: str) -> None:
    max_position_embeddings, rope, context = CONTEXTS[kind]
    model = tiny_model(max_position_embeddings=max_position_embeddings, rope_parameters=rope)
    assert context_of(model) == context


def test_linear_rope_of_one_kind_of_layers_does_not_stretch_the_context() -> None:
    """Gemma 3 names the extended length."""
    model = fresh_model("Gemma 3 (text)", rope_parameters={"full_attention": LINEAR, "sliding_attention": DEFAULT})
    assert context_of(model) == 256


def test_yarn_of_the_layers_with_full_attention_counts():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}
    model = fresh_model("Gemma 3 (text)", rope_parameters={"full_attention": yarn, "sliding_attention": DEFAULT})
    assert context_of(model) == 1024


def test_a_folder_is_published_by_its_name_and_a_snapshot_by_its_hub_id(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--ada--tiny-1.5B" / "snapshots" / "0123abc"
    for folder in (snapshot, tmp_path / "mine" / "snapshots" / "tiny"):
        folder.mkdir(parents=True)
    assert published_name(str(snapshot)) == "ada/tiny-1.5B"
    assert published_name(f"{snapshot}/") == "ada/tiny-1.5B"
    assert published_name(str(tmp_path / "mine" / "snapshots" / "tiny")) == "tiny"
    assert published_name("ada/tiny") == "ada/tiny"
