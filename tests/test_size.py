"""A method's way through the code stays short, and the files few."""

from tests.size import snapkv_functions, source_files


def test_few_functions_are_on_snapkvs_way() -> None:
    called = snapkv_functions()
    assert len({path for path, _ in called}) <= 10 and len(called) <= 45


def test_source_files_are_few() -> None:
    assert len(source_files()) <= 198
