"""Loads the fixtures that all tests share, starts the fork server, and orders tests."""

import gc

import pytest

pytest.register_assert_rewrite("tests.helpers")
pytest_plugins = ["tests.helpers.fixtures"]


def pytest_configure(config: pytest.Config) -> None:
    """In a run of many tests the fork server imports torch while the workers collect, so that no test waits for it."""
    if not hasattr(config, "workerinput"):  # none of xdist's workers
        return
    # Only now: the assertions of helpers must be rewritten, and the process that hands out tests needs no torch.
    from tests.helpers.forked import start_server
    from utils.compat import import_bitsandbytes_without_inductor

    start_server()
    import_bitsandbytes_without_inductor()  # as a run does; it takes a second less


def pytest_collection_finish() -> None:
    """What is imported and collected stays to the end: garbage collections during tests need not look through it."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first: at the end, no process works on while the others have nothing left to do."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
