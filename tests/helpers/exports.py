"""Exports by tools.export in the test's own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.export import main

KINDS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
Capture = pytest.CaptureFixture[str]


def export(source: Path, to: Path, *flags: str) -> Path:
    assert main([str(source), "--to", str(to), *flags]) == 0
    assert not list(to.parent.glob("*.incomplete"))
    return to
