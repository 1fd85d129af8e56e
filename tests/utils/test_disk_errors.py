"""Which errors are a disk's, and in what words."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from utils.disk_errors import disk_refusal, refused_by_disk
from utils.errors import ConfigError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
        (OSError("of a library, without a number"), "of a library, without a number"),
        (shutil.SameFileError("the same file"), "the same file"),
        (Exception("No space left on device (os error 28)"), "No space left on device"),
        (Exception("while serializing: I/O error: File too large (os error 27)"), "File too large"),
        (Exception("out of memory"), None),
        (ValueError("an error (28)"), None),
    ],
)
def test_a_disk_is_told_from_other_causes(error: Exception, reason: str | None) -> None:
    assert disk_refusal(error) == reason


def test_a_disk_that_fails_at_the_start_refuses_the_run_in_one_line() -> None:
    with pytest.raises(ConfigError) as refused, refused_by_disk("--output_dir", Path("there")):
        raise OSError(5, "Input/output error", "there/file")
    line = (
        "--output_dir: there/file cannot be read or written (Input/output error); mend that, and give the same command"
    )
    assert str(refused.value) == line
