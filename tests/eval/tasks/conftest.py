"""What tests of tasks share: a tokenizer of words, and no Hub."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def words() -> PreTrainedTokenizerFast:
    """One token a word; the chat template adds 3 to a prompt. It cannot decode."""
    backend = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    backend.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    template = "{% for message in messages %}<user> {{ message.content }} <end> {% endfor %}<assistant>"
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", chat_template=template)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the Hub."""
    monkeypatch.setattr("keepsight.eval.tasks.benchmark.hub_reachable", lambda: False)
