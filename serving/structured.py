"""Answers that are JSON of a schema: `response_format` of requests, by the grammars of llguidance."""

import importlib
import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerFast
from typing_extensions import override

from keepsight.errors import UserError, one_line

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
"""White space between the parts of JSON. Without a bound, small models write it until the answer is too long."""


class JsonGrammars:
    """Grammars over the tokens of one tokenizer, which is read when the first is asked for.

    Args:
        tokenizer: The tokenizer.
        vocabulary: Number of rows of the model's logits.
        end_tokens: Tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_tokens = end_tokens
        self._lock = threading.Lock()
        self._tokens: Any = None

    def grammar(self, schema: dict[str, Any]) -> Any:
        """The matcher of llguidance for texts of a JSON schema; it takes up to a second.

        Raises:
            UserError: llguidance is missing, cannot read the tokenizer, or refuses the schema.
        """
        try:
            llguidance: Any = importlib.import_module("llguidance")
            tokenizers: Any = importlib.import_module("llguidance.hf")
        except ImportError:
            raise UserError(
                "response_format: JSON needs llguidance on the server; ask its operator",
                field="response_format",
                code="missing",
            ) from None
        if not self._end_tokens or not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise UserError(
                "response_format: JSON needs a model with a fast tokenizer and an end token, which this server's lacks",
                field="response_format",
                code="model",
            )
        with self._lock:
            if self._tokens is None:
                self._tokens = tokenizers.from_tokenizer(
                    self._tokenizer, n_vocab=self._vocabulary, eos_token=[*self._end_tokens]
                )
        options = {"whitespace_pattern": _WHITESPACE}
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), options)
        matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise UserError(
                f"response_format: the schema cannot be followed: {one_line(matcher.get_error())}",
                field="response_format",
                code="data",
            )
        return matcher


class FollowGrammar(LogitsProcessor):
    """Hides the tokens with which an answer would leave a grammar. Each answer needs one of its own.

    Args:
        matcher: That of `JsonGrammars.grammar`, which is copied.
        prompt_tokens: Number of the prompt's tokens, which the ids begin with.
    """

    def __init__(self, matcher: Any, prompt_tokens: int) -> None:
        self._matcher = matcher.deep_copy()
        self._tokens_read = prompt_tokens

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        for token in input_ids[0, self._tokens_read :].tolist():
            self._matcher.consume_token(token)
        self._tokens_read = input_ids.shape[1]
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise UserError(
                f"response_format: the schema cannot be followed: {one_line(self._matcher.get_error())}",
                field="response_format",
                code="data",
            )
        is_allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: scores.shape[1]].astype(bool))
        return scores.masked_fill(~is_allowed.to(scores.device), -torch.inf)
