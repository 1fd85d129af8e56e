"""The table of other tools' files: which are taken, and what stands in for a model and data that are not here."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks.translated_files import commands_in, evenly, main
from tests.helpers.processes import ProcessGroup

AXOLOTL = """
base_model: owner/Llama-model
datasets: [{path: owner/rows, type: chat_template, field_messages: conversations}]
adapter: lora
lora_r: 4
lora_alpha: 8
lora_target_linear: true
sequence_len: 128
micro_batch_size: 2
learning_rate: 1e-4
"""


def test_files_are_taken_at_even_distances() -> None:
    assert evenly(list(range(40)), 4) == [0, 13, 26, 39]
    assert evenly([1, 2], 10) == [1, 2]


def test_commands_are_found_in_a_docstring() -> None:
    text = "python trl/scripts/sft.py \\\n    --model_name_or_path M \\\n    --packing\npython other.py\n"
    assert list(commands_in(text)) == [["python", "trl/scripts/sft.py", "--model_name_or_path", "M", "--packing"]]


@pytest.mark.slow
def test_a_file_is_planned_with_stand_ins_and_its_result_is_kept(process_group: ProcessGroup, tmp_path: Path) -> None:
    clone = tmp_path / "clones/axolotl-ai-cloud/axolotl"
    (clone / "examples").mkdir(parents=True)
    (clone / "examples/a.yaml").write_text(AXOLOTL)
    (clone / "examples/b.yaml").write_text("base_model: m\nadapter: stars\n")
    for repository in (
        "hiyouga/LLaMA-Factory",
        "huggingface/trl",
        "huggingface/alignment-handbook",
        "pytorch/torchtune",
    ):
        (tmp_path / "clones" / repository).mkdir(parents=True)
    (tmp_path / "clones/Lightning-AI/litgpt").mkdir(parents=True)
    for folder in (tmp_path / "clones").glob("*/*"):
        (folder / "COMMIT").write_text("0123abc\n")
    words = ["--clones", str(tmp_path / "clones"), "--out", str(tmp_path / "out")]
    for _ in range(2):  # again: results are read
        (done,) = process_group.run(partial(main, words), 1)
        assert done.status == 0, done.stderr
        table = (tmp_path / "out/table.md").read_text()
        assert "| axolotl | `examples/a.yaml` | 11: 10, 1, 0 " in table
        assert "| reached |" in table
        assert "| no: axolotl-ai-cloud/axolotl/examples/b.yaml: line 2: adapter: stars is no adapter" in table
        assert "https://github.com/pytorch/torchtune/tree/0123abc" in table
    assert "a small llama" in (tmp_path / "out/axolotl/00/result.json").read_text()
