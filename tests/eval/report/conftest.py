"""The rows of one evaluation for all tests of its report."""

import pytest

from keepsight.eval.record import ResultRow
from tests.eval.report.results import two_tasks


@pytest.fixture
def rows() -> list[ResultRow]:
    """See `two_tasks`."""
    return two_tasks()
