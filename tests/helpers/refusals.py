"""Flags that would run, to be spoilt one at a time, and what a refusal is: one line, and nothing written."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.processes import ProcessGroup


def write_lines(file: Path, rows: Sequence[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def dialogues(count: int) -> list[dict]:
    return [{"dialogue": f"Ann: Is it {i}?\nBob: Yes, {i}.", "summary": f"Bob says {i}."} for i in range(count)]


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path below a folder, with size and time of change; Python's own bytecode caches left out."""
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    stats = {str(path): path.stat(follow_symlinks=path.exists()) for path in paths}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def error_lines(stderr: str) -> list[str]:
    return [line for line in stderr.split("\n") if line.startswith("error: ")]


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{0:064}\nsize 9\n"
"""What git writes in place of a large file if git lfs is not installed."""


@dataclass
class Bench:
    """A model, data and an empty folder: flags that would run, to be spoilt one at a time."""

    model: Path
    samples: Path
    folder: Path
    group: ProcessGroup

    @property
    def output(self) -> Path:
        return self.folder / "run"

    def flags(self, *given: str) -> list[str]:
        """Working flags, less those that `given` replaces."""
        working = {"--model_name": self.model, "--output_dir": self.output, "--num_workers_dataloader": 0}
        if "--dataset" not in given:
            working["--samsum_dataset.data_path"] = self.samples
        return [str(part) for item in working.items() if item[0] not in given for part in item] + list(given)

    def dataset_function(self, body: str, name: str = "my_dataset.py") -> list[str]:
        """Flags for a dataset function with this body."""
        file = self.folder / name
        file.write_text(
            "import os\n\ndef get_custom_dataset(dataset_config, tokenizer, split):\n" + textwrap.indent(body, "    ")
        )
        return ["--dataset", str(file)]

    def copy_of_model(self) -> Path:
        return shutil.copytree(self.model, self.folder / "model")

    def refused(self, *given: str, world_size: int = 1) -> str:
        """The one line with which every rank is refused, having written nothing."""
        before = contents(self.folder)
        outcomes = self.group.run(self.flags(*given), world_size)
        printed = "\n".join(outcome.stderr for outcome in outcomes)
        assert [outcome.status for outcome in outcomes] == [2] * world_size, printed
        lines = error_lines(outcomes[0].stderr)
        assert len(lines) == 1, printed
        # No launcher ends these processes, so in the end the other ranks repeat it; under torchrun they are silent.
        for rank, outcome in enumerate(outcomes[1:], 1):
            assert error_lines(outcome.stderr) in ([], [lines[0].replace("error: ", f"error: rank {rank}: ", 1)])
        assert "Traceback" not in printed
        assert contents(self.folder) == before
        return lines[0]


DIFFERS_BY_RANK = "return [{'input_ids': [5, 6, 7 + int(os.environ['RANK'])], 'labels': [5, 6, 7]}] * 4"
