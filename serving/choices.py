"""What requests may choose of a server: an adapter by its name, and a budget, within the operator's limits.

Both servers take `extra_body={"keepsight": {"budget": 128, "adapter": "NAME"}}`, and refuse the same in the same words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keepsight.errors import UserError
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import Method

BUDGET = "keepsight.budget"
ADAPTER = "keepsight.adapter"
"""Fields of requests, as errors name them."""


@dataclass(frozen=True)
class Choice:
    """What a request chooses.

    Attributes:
        adapter: Name of one of the server's adapters; None for its `adapter=`.
        budget: Entries that each KV head keeps of the prompt, or a ratio of the prompt; None for the server's.
    """

    adapter: str | None = None
    budget: int | float | None = None

    @property
    def field(self) -> str:
        """The field of the request by which it chooses; empty where it chooses nothing."""
        if self.budget is not None:
            return BUDGET
        return "" if self.adapter is None else ADAPTER


@dataclass(frozen=True)
class Choices:
    """What a server lets requests choose.

    Attributes:
        max_budget: The largest budget of a request; None where it evicts nothing.
        adapters: Names of its further adapters.
    """

    max_budget: int | float | None = None
    adapters: Sequence[str] = ()

    def check(self, choice: Choice, prompt_tokens: int) -> None:
        """Check what a request chooses for a prompt of so many tokens.

        Raises:
            UserError: the server does not have or allow it.
        """
        if choice.adapter is not None and choice.adapter not in self.adapters:
            names = ", ".join(map(repr, self.adapters))
            choices = f"this server has {names}" if names else "this server has one alone, leave it out (adapters=)"
            raise UserError(
                f"{ADAPTER}: there is no adapter {choice.adapter[:64]!r}; {choices}", field=ADAPTER, code="unknown"
            )
        if choice.budget is None:
            return
        if self.max_budget is None:
            raise UserError(
                f"{BUDGET}: this server evicts nothing of such prompts, so that they have no budget; leave it out",
                field=BUDGET,
                code="conflict",
            )
        if entries_of(choice.budget, prompt_tokens) > entries_of(self.max_budget, prompt_tokens):
            raise UserError(
                f"{BUDGET}: {choice.budget} keeps more of this prompt than the {self.max_budget} that this server "
                "allows (max_budget=)",
                field=BUDGET,
                code="range",
            )


NO_CHOICES = Choices()


def entries_of(budget: int | float, prompt_tokens: int) -> int:
    """Entries per KV head that a budget stands for."""
    return budget if isinstance(budget, int) else round(budget * prompt_tokens)


def with_budget(method: Method, budget: int | float) -> Evict:
    """A method with another budget.

    Raises:
        UserError: the method has no budget, or it cannot be that.
    """
    if not isinstance(method, Evict):
        raise UserError(
            f"{type(method).__name__} evicts nothing, so that it has no budget", field="budget", code="conflict"
        )
    return replace(method, budget=budget)


def chosen_by(choice: Choice, method: Evict) -> Evict:
    """A method with the budget that a request chooses.

    Raises:
        UserError: the method cannot have it.
    """
    if choice.budget is None:
        return method
    try:
        return with_budget(method, choice.budget)
    except UserError as error:
        raise UserError(f"{BUDGET}: {error}", field=BUDGET, code=error.code) from None
