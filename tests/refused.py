"""Refusals by what they are about, whatever their words."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from keepsight.errors import Code, UserError


@contextmanager
def refused(field: str, code: Code, kind: type[UserError] = UserError) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """The block ends in an error of one line, of this kind, about this field and with this code."""
    with pytest.raises(kind) as error:
        yield error
    require_refusal(error.value, field, code)


def require_refusal(error: BaseException | None, field: str, code: Code) -> None:
    """An error is a UserError of one line, about this field and with this code."""
    assert isinstance(error, UserError)
    assert (error.field, error.code) == (field, code), str(error)
    assert "\n" not in str(error)
