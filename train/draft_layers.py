"""Which of a model's layers make a good draft, found by measurement.

Backward elimination: each step removes the layer without which the draft stays closest to the model. Nothing is
trained. Which layers can go depends on the model: in large ones most lie late in the middle (Men et al.
2024, "ShortGPT", arXiv 2403.03853).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import mean, median

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from keepsight.errors import UserError
from keepsight.files import append_lines, json_digest, whole_lines, write_lines
from keepsight.models.draft_sources import keep_layers
from keepsight.progress import progress_bar
from keepsight.train.plots import BLUE, VERMILLION, draw_line, tidy

TIMED_STEPS = 64


@dataclass(frozen=True)
class Text:
    """A prompt of N tokens with an answer of T, as the base model reads them.

    `ids` [1, N + T - 1] int64 leave out the answer's last token; `expected` [T, V] float32 are the model's
    log-probabilities of the answer's tokens.
    """

    ids: Tensor
    expected: Tensor


@dataclass(frozen=True)
class Closeness:
    """How closely a draft follows the base model, both reading the model's answers (teacher-forced).

    Attributes:
        kl: KL(model || draft) in nats, the mean over all answer tokens.
        agreement: Top-1 agreement of draft and model over the answer tokens.
        accepted: Mean number of tokens from an answer's start to the first disagreement.
    """

    kl: float
    agreement: float
    accepted: float


@dataclass(frozen=True)
class Subset(Closeness):
    """How closely a draft of the model's `layers`, indices in ascending order, follows it."""

    layers: list[int]


@torch.no_grad()
def read_answer(model: PreTrainedModel, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Text:
    """The text of a prompt and answer, with the model's log-probabilities of the answer."""
    ids = torch.tensor([[*prompt_ids, *answer_ids[:-1]]], device=model.device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(answer_ids)).logits[0]
    return Text(ids, logits.float().log_softmax(-1))


@torch.no_grad()
def closeness(draft: PreTrainedModel, texts: Sequence[Text], hidden: Sequence[Tensor] | None = None) -> Closeness:
    """How closely a draft, or its last layers, follows the model over some texts.

    `hidden` are the inputs of these layers for each text, [1, N + T - 1, hidden size]; the embeddings by default.
    """
    divergences = []
    agreements = []
    accepted = []
    for text, states in zip(texts, hidden or _embedded(draft, texts), strict=True):
        logits = draft(inputs_embeds=states, use_cache=False, logits_to_keep=len(text.expected)).logits[0]
        drafted = logits.float().log_softmax(-1)
        divergence = functional.kl_div(drafted, text.expected, reduction="none", log_target=True).sum(-1)
        agrees = drafted.argmax(-1) == text.expected.argmax(-1)
        divergences.append(divergence)
        agreements.append(agrees)
        accepted.append(int(agrees.long().cumprod(0).sum()))
    kl = float(torch.cat(divergences).mean())
    agreement = float(torch.cat(agreements).float().mean())
    return Closeness(kl, agreement, mean(accepted))


@torch.no_grad()
def search(model: PreTrainedModel, texts: Sequence[Text], keep: int, log: Path) -> list[Subset]:
    """Remove layers of a model one by one until `keep` are left; returns the subsets, largest first.

    The outputs of the layers before the one on trial are computed once for all trials. `log` is a JSON Lines file, a
    line per removal, from which a search that was stopped resumes. A `UserError` if it is of another model or other
    texts.
    """
    subsets = _logged_subsets(log, model, texts)
    layers = subsets[-1].layers if subsets else list(range(model.config.get_text_config().num_hidden_layers))
    inputs = _layer_inputs(keep_layers(model, layers), _embedded(model, texts))
    trial_count = sum(range(keep + 1, len(layers) + 1))
    with progress_bar(total=trial_count, name="layers on trial", unit="trial") as progress:
        while len(layers) > keep:
            best: Closeness | None = None
            removed = 0
            for number in range(len(layers)):
                later_layers = keep_layers(model, layers[number + 1 :])
                trial = closeness(later_layers, texts, inputs[number])
                if best is None or trial.kl < best.kl:
                    best = trial
                    removed = number
                progress.update()
            assert best is not None
            inputs_after = _layer_inputs(keep_layers(model, layers[removed + 1 :]), inputs[removed])
            layers = [*layers[:removed], *layers[removed + 1 :]]
            inputs = [*inputs[:removed], *inputs_after]
            subset = Subset(**asdict(best), layers=layers)
            subsets.append(subset)
            append_lines(log, [asdict(subset)])
    return subsets


@torch.no_grad()
def relative_time(draft: PreTrainedModel, model: PreTrainedModel, prompt_ids: Sequence[int]) -> float:
    """Time of a draft's greedy decoding step relative to the model's: the ratio of the medians of `TIMED_STEPS`.

    The two take turns, so that other load on the machine slows both.
    """
    turns = zip(_step_seconds(draft, prompt_ids), _step_seconds(model, prompt_ids), strict=True)
    draft_seconds = []
    model_seconds = []
    for draft_step, model_step in islice(turns, 1, TIMED_STEPS + 1):  # the prompts come first
        draft_seconds.append(draft_step)
        model_seconds.append(model_step)
    return median(draft_seconds) / median(model_seconds)


def draft_figure(searched: Sequence[Subset], held_out: Sequence[Subset]) -> Figure:
    """Agreement against the number of layers kept: a line for the search, a mark for each subset on held-out texts."""
    figure = Figure(figsize=(5.0, 3.2), layout="constrained")
    panel = figure.subplots()
    _draw_agreement(panel, searched, "texts of the search", BLUE, "o-")
    _draw_agreement(panel, held_out, "held-out texts", VERMILLION, "s")
    panel.set_ylim(0, 1)
    tidy(panel, "Top-1 agreement of draft and model", "layers kept")
    return figure


def _draw_agreement(panel: Axes, subsets: Sequence[Subset], label: str, colour: str, line: str) -> None:
    sizes = [len(subset.layers) for subset in subsets]
    agreements = [subset.agreement for subset in subsets]
    draw_line(panel, sizes, agreements, label, colour, line)


def _logged_subsets(log: Path, model: PreTrainedModel, texts: Sequence[Text]) -> list[Subset]:
    """The subsets of an earlier run of the same search; the log's first line says which search it is."""
    text_lengths = [(text.ids.tolist(), len(text.expected)) for text in texts]
    search = {"target": str(model.config.name_or_path), "texts": json_digest(text_lengths)}
    rows: list[dict[str, str] | Subset] = whole_lines(log, dict[str, str] | Subset)
    if not rows:
        write_lines(log, [search])
    elif rows[0] != search:
        raise UserError(
            f"{log}: this search began with another model or other texts; choose another out=",
            field="out",
            code="conflict",
        )
    return [row for row in rows if isinstance(row, Subset)]


@torch.no_grad()
def _embedded(model: PreTrainedModel, texts: Sequence[Text]) -> list[Tensor]:
    return [model.get_input_embeddings()(text.ids) for text in texts]


def _layer_inputs(model: PreTrainedModel, hidden: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """For each layer, its inputs: [1, N + T - 1, hidden size] for each text."""
    decoder = model.get_decoder()
    inputs_of_texts = []
    for states in hidden:
        output = decoder(inputs_embeds=states, use_cache=False, output_hidden_states=True)
        inputs_of_texts.append(output.hidden_states[:-1])
    return list(zip(*inputs_of_texts, strict=True))


def _step_seconds(model: PreTrainedModel, prompt_ids: Sequence[int]) -> Iterator[float]:
    """Answer a prompt greedily, ignoring end tokens; yields the seconds of each forward pass."""
    cache = DynamicCache()
    ids = torch.tensor([prompt_ids], device=model.device)
    while True:
        start = time.perf_counter()
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = torch.tensor([[int(logits[0, -1].argmax())]], device=model.device)  # waits for a GPU
        yield time.perf_counter() - start
