"""What `model.generate` asks of a method, and what an answer leaves behind for the next turn."""

from dataclasses import dataclass

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from keepsight.runtime.attention import Reader
from keepsight.runtime.decode import Decoded, Reapply, decode
from keepsight.runtime.images import Images
from keepsight.runtime.state import State


class Past(Cache):
    """What an answer leaves behind: the `past_key_values` of its output, from which the next turn goes on.

    Args:
        method: What answered.
        decoded: Its answer to one prompt. Its state stays unchanged, so that several turns can go on from it.

    Attributes:
        ids: [1, M] int64: prompt and answer, without the answer's last token, which has not been read.
    """

    def __init__(self, method: object, decoded: Decoded) -> None:
        super().__init__(layers=decoded.state.cache.layers)
        self.method, self.state, self.ids = method, decoded.state, decoded.ids[:, :-1]


@dataclass(frozen=True)
class GenerateRequest:
    """What `model.generate` asks of a `custom_generate`.

    Attributes:
        input_ids: [B, N] int64, the prompts, padded on the left.
        mask: [B, N], 0 for padding; None when no row is padded.
        past: What an earlier answer has left behind, whose tokens `input_ids` repeats; None to begin anew.
        chunk: Tokens per forward pass of the prefill; None for the whole prompt in one.
        pad_token: Fills the rows of the answer that have ended.
        stopping_criteria: As transformers defines them, over prompt and answer together.
        logits_processor: As transformers defines it.
        do_sample: Whether to sample instead of taking the arg-max.
        streamer: Receives each token.
        goes_on: Whether a further turn may go on from the answer.
        images: Images in the prompts; None for none.
    """

    input_ids: Tensor
    mask: Tensor | None
    past: Past | None
    chunk: int | None
    pad_token: int
    stopping_criteria: StoppingCriteriaList
    logits_processor: LogitsProcessorList
    do_sample: bool
    streamer: BaseStreamer | None
    goes_on: bool
    images: Images | None

    @property
    def unread(self) -> Tensor:
        """[B, n] int64: the tokens of `input_ids` that `past` has not read."""
        return self.input_ids if self.past is None else self.input_ids[:, self.past.ids.shape[1] :]

    def lengths(self) -> set[int]:
        """The prompts' lengths, without padding."""
        return {self.input_ids.shape[1]} if self.mask is None else {*self.mask.sum(dim=1).tolist()}

    def decode(self, reader: Reader, state: State, reapply: Reapply | None) -> Decoded:
        """Answer from a state; see `keepsight.runtime.decode.decode`."""
        return decode(
            reader,
            state,
            self.stopping_criteria,
            pad_token=self.pad_token,
            prompt_ids=self.input_ids,
            logits_processor=self.logits_processor,
            do_sample=self.do_sample,
            streamer=self.streamer,
            reapply=reapply,
        )
