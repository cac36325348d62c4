"""A method's way through the code stays short."""

from tests.size import snapkv_functions


def test_few_functions_are_on_snapkvs_way() -> None:
    called = snapkv_functions()
    assert len({path for path, _ in called}) <= 10 and len(called) <= 61
