"""The KV budget: how many entries are kept or read, a number or a ratio of the prompt's length."""

from dataclasses import dataclass

from keepsight.errors import UserError


@dataclass(frozen=True)
class Budget:
    """A budget as users give it.

    Attributes:
        given: Number of entries (int), or a ratio in (0, 1] (float).
        unit: The unit that messages name.
    """

    given: int | float
    unit: str = "entries"

    @property
    def is_ratio(self) -> bool:
        """Whether it depends on the prompt's length."""
        return isinstance(self.given, float)

    def check(self, name: str) -> None:
        """Refuse what is neither a number of at least 1 nor a ratio.

        Raises:
            UserError: with one line that starts with `name`.
        """
        if type(self.given) not in (int, float):
            raise UserError(f"{name}: budget {self.given!r} must be a whole number of {self.unit}, or a ratio")
        if self.is_ratio and not 0 < self.given <= 1:
            raise UserError(f"{name}: budget {self.given} is not a ratio in (0, 1]; give {self.unit} as a whole number")
        if self.given <= 0:
            raise UserError(f"{name}: budget {self.given} is below 1; give the {self.unit} to keep or to read")

    def entries(self, length: int) -> int:
        """The budget for a prompt of `length` tokens; a ratio is rounded, and gives at least 1."""
        return max(round(self.given * length), 1) if self.is_ratio else int(self.given)
