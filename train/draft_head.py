"""Draft-head training: unrolled over its own outputs, a head learns the base model's next-token distributions."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device, gather_object
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, PreTrainedModel
from typing_extensions import override

from keepsight.data_gen.store import TrainingSample
from keepsight.errors import UserError
from keepsight.files import atomic_file, file_digest, hex_digest, one_writer, read_json, write_json
from keepsight.models.decoder import decoder_of, logits_of, on_each
from keepsight.models.distributed import launched, map_over_processes
from keepsight.models.draft_head import DraftHead, default_feature_layers
from keepsight.models.identity import MadeWith
from keepsight.progress import progress_bar
from keepsight.runtime.features import RecordFeatures
from keepsight.train.dataset import Batch
from keepsight.train.draft_ops import UnrolledAttention, chunked_loss
from keepsight.train.objective import HeadObjective
from keepsight.train.settings import DraftHeadSettings


@dataclass(frozen=True)
class HiddenStates:
    """The base model's states of n tokens: three layers' outputs [n, 3 * hidden], its lm_head's input [n, hidden]."""

    features: Tensor
    hidden: Tensor


Teacher = Callable[[Tensor], HiddenStates]
"""The token ids of a text, [n] int64 -> the base model's hidden states."""


@dataclass(frozen=True)
class RunModel:
    """A teacher that runs the base model, without gradients.

    Attributes:
        model: In evaluation mode.
        layers: Indices of the layers whose outputs are the features.
    """

    model: PreTrainedModel
    layers: Sequence[int]

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> HiddenStates:
        """See `Teacher`."""
        with RecordFeatures(self.model, tuple(self.layers)) as features:
            output = decoder_of(self.model)(input_ids=ids[None].to(self.model.device), use_cache=False)
        joined = torch.cat(features.outputs(), dim=-1)[0]
        return HiddenStates(joined, output.last_hidden_state[0].to(joined.device))


@dataclass(frozen=True)
class NextTokens:
    """The base model's next-token distributions [n, V] after n tokens, over a draft vocabulary of V tokens.

    `in_vocabulary` [n] bool says whether the base model's top-1 token lies in the draft vocabulary.
    """

    probabilities: Tensor
    in_vocabulary: Tensor


_TEACHER_ROWS = 256


@torch.no_grad()
def next_tokens(hidden: Tensor, model: PreTrainedModel, vocabulary: Tensor, dtype: torch.dtype) -> NextTokens:
    """The next-token distributions, computed a few rows at a time, with probabilities in `dtype`.

    From the input of the base model's lm_head, [n, hidden], over a draft vocabulary in its ids, [V] int64.
    """
    probabilities = hidden.new_empty(len(hidden), len(vocabulary), dtype=dtype)
    in_vocabulary = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
    vocabulary_on = on_each(vocabulary)
    for start in range(0, len(hidden), _TEACHER_ROWS):
        chunk = slice(start, start + _TEACHER_ROWS)
        logits = logits_of(model, hidden[chunk])
        drafted = logits.index_select(1, vocabulary_on(logits.device))
        probabilities[chunk] = drafted.softmax(-1, dtype=torch.float32)
        in_vocabulary[chunk] = drafted.amax(-1) == logits.amax(-1)  # an argmax takes a CPU ten times as long
    return NextTokens(probabilities, in_vocabulary)


_MANIFEST = "manifest.json"
_SHARD = 32
"""Texts in a file: about 150 MB for a small model and texts of 1K tokens."""


@dataclass(frozen=True)
class _Manifest:
    """What stored hidden states depend on, and the digests of the complete files, by name."""

    made_with: MadeWith
    digests: dict[str, str] = field(default_factory=dict)


class StoredStates:
    """A teacher that reads hidden states from a folder written by `write_states`, by the token ids of a text."""

    def __init__(self, folder: Path) -> None:
        self._shards: dict[str, Path] = {}
        manifest: _Manifest = read_json(folder / _MANIFEST, _Manifest)
        for name, digest in manifest.digests.items():
            path = folder / Path(name).name
            if file_digest(path) != digest:
                raise UserError(
                    f"{path}: changed since it was written; delete it to have it computed again",
                    field="features",
                    code="file",
                )
            with safe_open(path, framework="pt") as tensors:
                for tensor_name in tensors.keys():  # noqa: SIM118
                    key = tensor_name.partition(".")[0]
                    self._shards[key] = path

    def __call__(self, ids: Tensor) -> HiddenStates:
        """[n] int64 -> the hidden states, on the device of `ids`.

        Raises:
            UserError: the folder lacks this text or a part of its hidden states.
        """
        key = _key(ids.tolist())
        if key not in self._shards:
            raise UserError(
                f"a sample of {len(ids)} tokens is not in features=; delete that folder to make it again",
                field="features",
                code="missing",
            )
        path = self._shards[key]
        states = []
        with safe_open(path, framework="pt", device=str(ids.device)) as tensors:
            for tensor_name in (f"{key}.features", f"{key}.hidden"):
                if tensor_name in tensors.keys():  # noqa: SIM118
                    states.append(tensors.get_tensor(tensor_name))
        if [len(rows) for rows in states] != [len(ids), len(ids)]:
            raise UserError(
                f"{path}: a sample of {len(ids)} tokens is incomplete; delete that file", field="features", code="file"
            )
        features, hidden = states
        return HiddenStates(features, hidden)


def write_states(folder: Path, teacher: Teacher, texts: Sequence[list[int]], made_with: MadeWith) -> None:
    """Write the hidden states of all texts that are missing from the folder; a killed run can thus resume.

    Several processes of one launch divide the files among themselves. `made_with` has all that the hidden
    states depend on: model, data, and settings. A `UserError` if the folder was written with others.
    """
    manifest = _Manifest(made_with)
    if (folder / _MANIFEST).exists():
        manifest = read_json(folder / _MANIFEST, _Manifest)
        advice = "choose another features=, or delete the folder"
        manifest.made_with.require(made_with, f"{folder}: these features were made", advice)

    def write_shard(start: int) -> dict[str, str]:
        """Write the file of the texts from index `start` on; its name and digest."""
        path = folder / _shard_name(start)
        with atomic_file(path) as unfinished:
            tensors = {}
            for ids in texts[start : start + _SHARD]:
                key = _key(ids)
                for name, tensor in vars(teacher(torch.tensor(ids))).items():
                    tensors[f"{key}.{name}"] = tensor.cpu().contiguous()
            save_file(tensors, unfinished)
        return {path.name: file_digest(path)}

    processes = launched()
    with one_writer(folder) if processes.is_main_process else nullcontext():
        missing = []
        for start in range(0, len(texts), _SHARD):
            name = _shard_name(start)
            if name not in manifest.digests or not (folder / name).is_file():
                missing.append(start)
        processes.wait_for_everyone()
        rounds = range(0, len(missing), processes.num_processes)
        for first in progress_bar(rounds, name="features", unit="round"):
            starts = missing[first : first + processes.num_processes]
            digests = []
            if processes.process_index < len(starts):
                digests.append(write_shard(starts[processes.process_index]))
            for shard_digest in gather_object(digests):
                manifest.digests.update(shard_digest)
            if processes.is_main_process:
                write_json(folder / _MANIFEST, asdict(manifest))
        processes.wait_for_everyone()


def _shard_name(start: int) -> str:
    return f"readings-{start // _SHARD:05d}.safetensors"


def _key(ids: list[int]) -> str:
    return hex_digest([str(ids).encode()])[:32]


_FROM_MODEL = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "initializer_range",
)
_ROWS = 512
"""Number of rows whose logits a measurement computes at once."""
_FIRST_LOGITS = 0.5
"""Standard deviation of a new head's logits."""


def frequent_tokens(
    samples: Iterable[TrainingSample], count: int, end_tokens: Iterable[int], vocabulary: int
) -> Tensor:
    """The most frequent tokens of answers and, in any case, the end tokens.

    Ties, as between all tokens in no answer, go to the token that is more frequent in prompts, then to the lower id.

    Returns:
        [count] int64, ascending.

    Raises:
        UserError: the base model has fewer tokens.
    """
    if not 0 < count <= vocabulary:
        raise UserError(
            f"draft_head.vocabulary={count} must lie between 1 and {vocabulary}, the model's vocabulary",
            field="draft_head.vocabulary",
            code="range",
        )
    always_drafted = set(end_tokens)
    answer_counts: Counter[int] = Counter()
    prompt_counts: Counter[int] = Counter()
    for sample in samples:
        answer_counts.update(sample.answer_ids)
        prompt_counts.update(sample.prompt_ids)

    def rank(token: int) -> tuple[bool, int, int, int]:
        return token not in always_drafted, -answer_counts[token], -prompt_counts[token], token

    most_frequent = sorted(range(vocabulary), key=rank)[:count]
    return torch.tensor(sorted(most_frequent))


def new_draft_head(model: PreTrainedModel, vocabulary: Tensor, trained: int | None = None) -> DraftHead:
    """A random head of the base model's width, in float32 on its device; its lm_head starts as the model's.

    The last norm starts small, so that the first logits are no larger than those of a random lm_head. The draft
    vocabulary [V] int64 is in the base model's ids, ascending. `trained` are the tokens of the longest training sample,
    the head's `max_position_embeddings`, beyond which YaRN has to extend it; the base model's by default.
    """
    text = model.config.get_text_config()
    values: dict[str, Any] = {}
    for name in _FROM_MODEL:
        if hasattr(text, name):
            values[name] = getattr(text, name)
    if trained is not None:
        values["max_position_embeddings"] = min(trained, text.max_position_embeddings)
    feature_layers = list(default_feature_layers(text.num_hidden_layers))
    values["draft_vocab_size"] = len(vocabulary)
    values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": feature_layers}
    config = LlamaConfig(
        **values,
        rope_parameters=text.rope_parameters,
        num_hidden_layers=1,
        tie_word_embeddings=False,
    )
    head = DraftHead(config)
    for module in head.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=config.initializer_range)
    head.set_vocabulary(vocabulary)
    lm_head: Any = model.get_output_embeddings()
    with torch.no_grad(), align_module_device(lm_head):
        head.lm_head.weight.copy_(lm_head.weight[vocabulary.to(lm_head.weight.device)])
        head.norm.weight.fill_(_FIRST_LOGITS / head.lm_head.weight.norm(dim=1).mean().item())
    return head.to(model.device)


class DraftHeadObjective(HeadObjective):
    """The training-time test of EAGLE-3 (arXiv 2503.01840, section 3.2).

    At step i, row t of a text has two inputs: the output of step i - 1 in row t (at step 0 the base model's features of
    token t) and the embedding of token t + 1 + i. It predicts token t + 2 + i, with the base model's probabilities as
    labels, normalised over the draft vocabulary. Rows count where the base model's top-1 token lies in that vocabulary,
    and the predicted token in the answer, or anywhere with `loss_on=all`.

    Args:
        head: The head in training, in float32.
        model: Provides embeddings and lm_head. It is not a submodule, so it is neither trained, saved nor moved.
        teacher: Provides the base model's hidden states.
        settings: Number of unrolled steps, their weights, the tokens that are learned, and the length at which texts
            are truncated.
    """

    head: DraftHead
    weights_file = "draft_head.safetensors"
    settings_key = "draft_head.train"
    measures_autocast = True

    def __init__(self, head: DraftHead, model: PreTrainedModel, teacher: Teacher, settings: DraftHeadSettings) -> None:
        super().__init__()
        self.head = head
        self.settings = settings
        self._model = (model,)  # in a tuple: torch would register the model as a submodule
        self._teacher = teacher

    @override
    def loss(self, batch: Batch) -> Tensor:
        losses = []
        for ids, prompt_length in zip(batch.texts(), batch.prompt_lengths(), strict=True):
            first_learned = prompt_length if self.settings.loss_on == "answers" else 0
            losses.append(self.text_loss(ids, first_learned))
        return torch.stack(losses).mean()

    def text_loss(self, ids: Tensor, first_learned: int = 0) -> Tensor:
        """The loss of one text, [n] int64: the sum over steps of decay^i times the mean cross entropy of its rows.

        Only rows that predict token `first_learned` or a later one count; logits of others are not computed.
        """
        steps, hidden = self.states(ids)
        # The base model's row j predicts token j + 1; its row 0 teaches no row of the head. The copy is aligned alike
        # whether the states were computed or mapped from a file, so that their products are the same to the last bit.
        taught = hidden[max(first_learned, 2) - 1 :].clone()
        teacher = self.next_tokens(taught, _product_dtype(steps[0]))
        teacher_rows = len(teacher.in_vocabulary)
        learned_steps = []
        weights = []
        for step, lm_head_inputs in enumerate(steps):
            # Both end with the text's last row, so a step's last rows learn from the teacher's last ones.
            row_count = min(len(lm_head_inputs), teacher_rows)
            is_learned = teacher.in_vocabulary[teacher_rows - row_count :].float()
            learned_steps.append(lm_head_inputs[len(lm_head_inputs) - row_count :])
            weights.append(self.settings.decay**step * is_learned / is_learned.sum().clamp(min=1))
        return chunked_loss(learned_steps, self.head.lm_head.weight, teacher.probabilities, weights)

    @override
    def measure(self, batches: Iterable[dict[str, Any]], budget: int) -> dict[str, Any]:
        return measure_draft_head(self, batches)

    def next_tokens(self, hidden: Tensor, dtype: torch.dtype) -> NextTokens:
        """`next_tokens` of the base model over the head's vocabulary."""
        return next_tokens(hidden, self._model[0], self.head.t2d.nonzero()[:, 0], dtype)

    def states(self, ids: Tensor) -> tuple[list[Tensor], Tensor]:
        """Unroll the head over a text [n] int64.

        For each step i, the input of the head's lm_head, [n - 1 - i, hidden] (a text shorter than the unrolling has
        fewer steps), and that of the base model's, [n, hidden]: row t of step i learns from row t + 1 + i.
        """
        ids = ids[: self.settings.max_tokens]
        head = self.head
        (model,) = self._model
        states = self._teacher(ids)
        dtype = head.fc.weight.dtype
        embeddings = head.embedding(model)(ids[None]).detach().to(dtype)
        positions = torch.arange(len(ids), device=ids.device)[None]
        attend = UnrolledAttention()
        features = head.combine(states.features[None].to(dtype))
        steps = []
        for step in range(min(self.settings.unroll, len(ids) - 1)):
            rows = len(ids) - 1 - step
            next_embeddings = embeddings[:, 1 + step :]
            row_positions = positions[:, step : step + rows]
            features = head(next_embeddings, features[:, :rows], row_positions, attend)
            lm_head_input = features if head.norm_output else head.norm(features)
            steps.append(lm_head_input[0])
        return steps, states.hidden


def _product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of matrix products under mixed precision; the tensor's own without it."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def measure_draft_head(objective: DraftHeadObjective, batches: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Compare a head with its base model on the answers of held-out samples; see `Objective.measure`.

    The answers are the model's greedy ones: as long as a draft's tokens are right, the steps unrolled over the answer
    equal the steps of drafting.

    Returns:
        Lists of a value for each unrolled step, and their means `eval_kl` and `eval_agreement`: `eval_kl_by_step`,
        KL(model || head) over the draft vocabulary, in nats, where the model's top-1 token lies in it;
        `eval_agreement_by_step`, top-1 agreement of head and base model over the model's vocabulary;
        `eval_acceptance_by_position`, the share of greedy drafts whose i-th token is accepted, among those whose
        earlier tokens are. `eval_accepted_length` is the mean number of accepted tokens of a draft.

    Raises:
        FloatingPointError: a logit of the head is NaN or infinite.
    """
    longest = objective.settings.max_tokens

    def batch_sums(values: dict[str, Any]) -> Tensor:
        batch = Batch(**values)
        sums = []
        for ids, prompt_length in zip(batch.texts(), batch.prompt_lengths(), strict=True):
            sums.append(_sample_sums(objective, ids[:longest], prompt_length))
        return torch.stack(sums).sum(0)

    with objective.measuring():
        sums = map_over_processes(batch_sums, batches)
    kl, kl_rows, agreeing, rows, accepted, tried = torch.stack(sums).sum(0).T
    kl_by_step = (kl / kl_rows.clamp(min=1)).tolist()
    agreement_by_step = (agreeing / rows.clamp(min=1)).tolist()
    acceptance = accepted / tried.clamp(min=1)
    return {
        "eval_kl": sum(kl_by_step) / len(kl_by_step),
        "eval_agreement": sum(agreement_by_step) / len(agreement_by_step),
        "eval_accepted_length": float(acceptance.cumprod(0).sum()),
        "eval_kl_by_step": kl_by_step,
        "eval_agreement_by_step": agreement_by_step,
        "eval_acceptance_by_position": acceptance.tolist(),
    }


def _sample_sums(objective: DraftHeadObjective, ids: Tensor, prompt_length: int) -> Tensor:
    """[S, 6] for one sample: KL sum, rows it is over; agreeing rows, all rows; accepted drafts, drafts tried."""
    sums = torch.zeros(objective.settings.unroll, 6, dtype=torch.float64)
    steps, hidden = objective.states(ids)
    start = max(0, prompt_length - 2)  # the row that predicts the answer's first token
    teacher = objective.next_tokens(hidden[start + 1 :], torch.float32)
    # the base model's top-1 tokens, where they are in the draft vocabulary
    model_tokens = objective.head.target_ids(teacher.probabilities.argmax(-1))
    is_accepted = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    for step, rows in enumerate(steps):
        head_tokens, divergence = _head_tokens(objective, rows[start:], teacher.probabilities[step:])
        in_vocabulary = teacher.in_vocabulary[step:]
        is_agreeing = in_vocabulary & (head_tokens == model_tokens[step:])
        answer_tokens = ids[start + 2 + step :]
        is_tried = is_accepted[: len(answer_tokens)]
        is_accepted = is_tried & (head_tokens[: len(answer_tokens)] == answer_tokens)
        sums[step, 0] = float(divergence[in_vocabulary].sum())
        sums[step, 1] = float(in_vocabulary.sum())
        sums[step, 2] = float(is_agreeing.sum())
        sums[step, 3] = len(in_vocabulary)
        sums[step, 4] = float(is_accepted.sum())
        sums[step, 5] = float(is_tried.sum())
    return sums


def _head_tokens(objective: DraftHeadObjective, hidden: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """The head's top-1 tokens in the base model's ids, and KL(model || head) of each row."""
    tokens = [hidden.new_zeros(0, dtype=torch.long)]
    divergences = [hidden.new_zeros(0, dtype=torch.float32)]
    for rows, expected in zip(hidden.split(_ROWS), probabilities.split(_ROWS), strict=True):
        logits = objective.head.lm_head(rows).float()
        if not torch.isfinite(logits).all():
            raise FloatingPointError("the head's logits on held-out samples are not finite")
        tokens.append(objective.head.target_ids(logits.argmax(-1)))
        divergences.append(functional.kl_div(logits.log_softmax(-1), expected, reduction="none").sum(-1))
    return torch.cat(tokens), torch.cat(divergences)
