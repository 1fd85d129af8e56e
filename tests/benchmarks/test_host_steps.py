"""The table of steps in host memory has a row for each kind of work, dtype and number of cores."""

from __future__ import annotations

import pytest
import torch

from benchmarks.host_steps import cores, main


def test_each_number_of_cores_is_measured_for_steps_and_copies(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    main(["--weights", "1000"])
    torch.set_num_threads(threads)
    _, _, *rows = capsys.readouterr().out.splitlines()
    found = [tuple(row.strip("| ").split(" | ")[:3]) for row in rows]
    assert found == [
        (kind, dtype, str(number))
        for kind in ("AdamW", "copy")
        for dtype in ("bfloat16", "float32")
        for number in cores()
    ]
    assert all(float(row.strip("| ").split(" | ")[3]) > 0 for row in rows)
