"""Steps in which the allocator runs out of room are told once, with what to set."""

from __future__ import annotations

import pytest

from reporting.allocator_retries import AllocatorRetries


def lines_of(numbers: list[tuple[int, int]]) -> list[str]:
    watch = AllocatorRetries()
    return [line for step, number in numbers if (line := watch.line(step, number))]


def test_retries_in_every_step_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    (line,) = lines_of([(1, 2), (10, 20), (20, 40), (30, 60)])
    assert line == (
        "memory: the allocator ran out of room 18 times in 9 steps; each time the GPU waits until its cache is freed "
        "and asked for again: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment, or keep less "
        "(--activation_checkpointing selective or full, --batch_size_training)"
    )
    assert len(lines_of([(step, 2 * step) for step in range(1, 40)])) == 1  # a line after each step


def test_what_is_set_already_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    (line,) = lines_of([(1, 0), (10, 9)])
    assert "expandable" not in line
    assert "asked for again: keep less" in line


def test_a_few_retries_are_no_line() -> None:
    assert not lines_of([(1, 0), (2, 5), (10, 3), (20, 6)])  # fewer than one in two steps
    assert not lines_of([(step, 0) for step in range(1, 40)])
    assert not lines_of([(5, 100)])  # a resumed session's first


def test_retries_that_begin_late_are_told() -> None:
    assert len(lines_of([(1, 0), (10, 0), (20, 0), (30, 10)])) == 1


def test_what_an_evaluation_retries_is_not_its_steps() -> None:
    watch = AllocatorRetries()
    assert watch.line(10, 0) is None
    watch.begin_again(10, 90)
    assert watch.line(20, 90) is None
    assert watch.line(30, 100) is not None
