"""`Objective`, the interface of a module in training: from a batch to a loss; and recomputation of activations."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from typing_extensions import Self, override

from keepsight.errors import UserError
from keepsight.models.decoder import decoder_layers, decoder_of, entry_owners, full_attention_layers
from keepsight.runtime.attention import passes_to_resume, recording
from keepsight.runtime.distance_bias import relative_states
from keepsight.train.dataset import Batch
from keepsight.train.replay import ReplayBuffer, TeacherOutputs
from keepsight.train.settings import TrainSettings


class Objective(nn.Module, ABC):
    """A small module in training and its frozen base model, as the Trainer calls them.

    Attributes:
        weights_file: Name of the module's weights in a checkpoint.
        settings_key: Name of the optimisation's settings in a recipe.
        launchers: Files of recipes/accelerate/ that it supports besides DDP's.
        measures_autocast: Whether it is measured under the mixed precision of the training.
        epoch: The epoch of the training, from 0; the trainer sets it.
    """

    epoch = 0
    weights_file: ClassVar[str]
    settings_key: ClassVar[str] = "train"
    launchers: tuple[str, ...] = ("zero2", "zero3", "fsdp2")
    measures_autocast: ClassVar[bool] = False

    def forward(self, **values: Any) -> dict[str, Tensor]:
        """The fields of a `Batch`, as `collate` makes them -> `{"loss": scalar}`."""
        return {"loss": self.loss(Batch(**values))}

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """The mean loss over the samples of a batch, a scalar; gradients flow to the trained module alone."""

    @abstractmethod
    def measure(self, batches: Iterable[dict[str, Any]], budget: int) -> dict[str, Any]:
        """Measure the module on held-out batches, which the processes divide among themselves.

        The batches, made by `keepsight.train.dataset.collate`, are the same on every process; `budget` is the number of
        KV entries per head at which entries are selected. Returns numbers to log, and lists that are written to
        fidelity.jsonl and sent to trackers only; a `FloatingPointError` if a value is NaN or infinite.
        """

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The module's own tensors, as a checkpoint holds them."""

    @abstractmethod
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """The inverse of `weights`."""

    def decisive(self) -> dict[str, Any]:
        """Settings besides the optimisation that must be the same when a training is resumed, by their recipe keys."""
        return {}

    def parameter_groups(self, settings: TrainSettings) -> list[dict[str, Any]]:
        """The optimiser's parameter groups."""
        return [{"params": self.trained_parameters(), "lr": settings.learning_rate}]

    def trained_parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def flops(self, batch: Batch) -> float | None:
        """Floating-point operations of the loss of a batch and its gradients; None where they are not known."""
        return None

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a DeepSpeed checkpoint, which holds only the trained parameters; the frozen ones stay as they are."""
        keys = super().load_state_dict(state_dict, strict=False, assign=assign)
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        missing_or_surplus = trained.intersection(keys.missing_keys).union(keys.unexpected_keys)
        if strict and missing_or_surplus:
            raise RuntimeError(f"missing or surplus in the checkpoint: {min(missing_or_surplus)}")
        return keys

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Evaluation mode without gradients within the block; then the previous mode is restored."""
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.train(training)


class HeadObjective(Objective):
    """An objective that trains a head, which is too small to be sharded over processes.

    Attributes:
        head: The head in training.
        settings: Its settings, with those of the optimisation as `train`.
    """

    head: nn.Module
    settings: Any
    launchers = ("zero2",)

    @override
    def decisive(self) -> dict[str, Any]:
        section = self.settings_key.removesuffix(".train")
        values = {}
        for name, value in vars(self.settings).items():
            if name != "train":
                values[f"{section}.{name}"] = value
        return values

    @override
    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu() for name, value in self.head.state_dict().items()}

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.head.load_state_dict(weights)


class ReplayedObjective(Objective):
    """An objective whose teacher outputs can be kept for several steps; see `keepsight.train.replay`.

    Attributes:
        buffer: Where teacher outputs are kept; None where they are computed for each step.
    """

    buffer: ReplayBuffer | None = None

    @override
    def train(self, mode: bool = True) -> Self:
        """As in torch, but base models stay in evaluation mode: with checkpointing, training mode drops the cache."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, PreTrainedModel):
                module.eval()
        return self

    @override
    def loss(self, batch: Batch) -> Tensor:
        return self.loss_of(self.teacher_outputs(batch), batch)

    @abstractmethod
    def run_teacher(self, batch: Batch) -> TeacherOutputs:
        """Run the base model over a batch without gradients; the outputs do not depend on the module."""

    @abstractmethod
    def loss_of(self, outputs: TeacherOutputs, batch: Batch) -> Tensor:
        """The loss, from teacher outputs in float32 or the base model's dtype."""

    def teacher_outputs(self, batch: Batch) -> TeacherOutputs:
        """The teacher outputs of a batch, from the buffer if there is one."""
        if self.buffer is None:
            return self.run_teacher(batch)
        return self.buffer.take(batch, lambda: self.run_teacher(batch))

    def token_bytes(self, batch: Batch) -> float:
        """Bytes of kept teacher outputs per token, measured on a batch of one sample."""
        assert self.buffer is not None
        return self.buffer.bytes_of(self.run_teacher(batch)) / self.kept_tokens(batch)

    def kept_tokens(self, batch: Batch) -> int:
        """Number of tokens of a batch that its teacher outputs cover, padding included."""
        return batch.prompt_ids.numel() + batch.answer_ids.numel()


@contextmanager
def recomputed(
    model: PreTrainedModel, asked: bool, under: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[None]:
    """Within the block, activations of layers with full attention are recomputed for their gradients, if `asked`.

    transformers' own gradient checkpointing works only without a cache; these layers read one and do not write to it.
    Hooks around a layer (FSDP2's, which gather its weights) are not run again, hooks inside it are. The pass and each
    recomputation run `under` a context, such as an enabled adapter. Without gradients the block changes nothing.

    Raises:
        UserError: several layers of the model read the same entries.
    """
    if not (asked and torch.is_grad_enabled()):
        yield
        return
    if entry_owners(model.config) != list(range(len(decoder_layers(model)))):
        raise UserError(
            f"gradient_checkpointing: layers of {model.config.model_type} read the entries of others, so that none can "
            "be recomputed alone; set it to false",
            field="gradient_checkpointing",
            code="model",
        )
    decoder = decoder_of(model)
    stack = decoder_layers(model)
    layers = [stack[index] for index in full_attention_layers(model.config)]

    @contextmanager
    def recomputation(under_way: AbstractContextManager[None]) -> Iterator[None]:
        with under(), recording(decoder), relative_states(decoder), under_way:
            yield

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For the pass itself, and for the recomputation."""
        return nullcontext(), recomputation(passes_to_resume())

    earlier_forwards = [vars(layer).get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
        yield
    finally:
        for layer, earlier_forward in zip(layers, earlier_forwards, strict=True):
            if earlier_forward is None:
                vars(layer).pop("forward", None)
            else:
                layer.forward = earlier_forward
