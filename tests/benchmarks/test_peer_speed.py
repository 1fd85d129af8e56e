"""benchmarks/peer_speed.py: its table, results that it goes on with, and what it asks other tools for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.peer_speed import CEILING, lines_to_run, main, own_tokens, same_work, table
from benchmarks.peer_speed import ROWS as OF_ROWS
from benchmarks.peers.calls import work_of
from benchmarks.peers.peer_work import PeerWork, parse_work
from benchmarks.runs.card import at_work
from benchmarks.training_speed import ROWS as WORKLOADS
from configs.flags import parse_flags

PEERS_IN_ORDER = ["TRL + Liger", "torchtune", "Unsloth", "Axolotl", "NeMo AutoModel"]
FIGURES = {"tokens_per_second": 12_000.0, "peak_gib": 80.0, "first_loss": 12.5}
RESULTS = {
    ("", CEILING): {"tflops": 800.0},
    ("P2", "finetuning.py"): FIGURES | {"tflops": 600.0, "losses": [12.5, 12.25]},
    ("P2", "TRL + Liger"): FIGURES | {"tokens_per_second": 10_000.0, "losses": [12.5, 12.0]},
    ("P2", "torchtune"): FIGURES | {"tokens_per_second": 9_000.0},
}


def test_tools_are_compared_with_the_fastest_peer_and_with_the_ceiling() -> None:
    lines = list(table([line for line in RESULTS if line[0]], RESULTS))[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[3:6] for row in cells] == [["1.200", "600", "0.75"], ["1.000", "500", "0.62"], ["0.900", "450", "0.56"]]
    assert [row[8] for row in cells] == ["0.0000", "0.2500", "nan"]


def test_lines_that_are_there_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "speed.jsonl"
    kept = [{"row": row, "tool": tool} | found for (row, tool), found in RESULTS.items() if row]
    file.write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert main(["--rows", "P2", "--peers", "TRL + Liger", "torchtune", "--results", str(file)]) == 0
    assert "| P2 | TRL + Liger | 10,000 | 1.000 |" in capsys.readouterr().out
    assert main(["--rows", "P2", "P6", "--results", str(file), "--minutes", "0"]) == 1
    printed = capsys.readouterr().out
    assert "| P6 | finetuning.py | not run yet |" in printed
    assert "| P6 | TRL + Liger | not run yet |" in printed
    assert "| P6 | torchtune |" not in printed


def test_tokens_of_pairs_are_those_of_both_texts_though_they_share_their_prompt() -> None:
    row = WORKLOADS[OF_ROWS["P8"]]  # texts of 1,024 tokens, half of them prompt
    shared, whole = ({"num_tokens": 4 * of_pair, "num_pairs": 4} for of_pair in (2048 - 511, 2048))
    assert own_tokens(row, [shared] * 3, 12) == 2048 / (2048 - 511)
    assert own_tokens(row, [whole] * 3, 12) == 1
    assert own_tokens(WORKLOADS[OF_ROWS["P4"]], [{"num_tokens": 8192}], 12) == 1


def test_a_peer_is_asked_for_what_the_row_trains() -> None:
    asked = work_of(WORKLOADS["llama8b-qlora-all"], 12, Path("model"))
    assert parse_work(asked.words) == asked
    linear = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    assert asked == PeerWork("model", "qlora", 2, 4096, 12, 16, linear, double_quant=True)
    assert work_of(WORKLOADS["llama8b-full-ac"], 12, Path("model")).activation_checkpointing
    assert work_of(WORKLOADS["llama8b-lora-all-padded"], 12, Path("model")).batching == "padded"


def test_peers_run_the_rows_that_their_runners_can() -> None:
    tools = {row: [tool for _, tool in lines_to_run([row], PEERS_IN_ORDER, [])] for row in ("P6", "P8", "P13", "P14")}
    assert tools == {
        "P6": ["TRL + Liger"],
        "P8": ["TRL + Liger"],
        "P13": ["TRL + Liger", "Unsloth", "Axolotl"],
        "P14": ["TRL + Liger", "Unsloth", "Axolotl", "NeMo AutoModel"],
    }


def test_padded_rows_come_in_the_batches_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of like length, the same documents in each call; tokens are counted without padding."""
    monkeypatch.setenv("ROW_LENGTH", "512")
    monkeypatch.setenv("NUM_ROWS", "64")
    work = PeerWork("model", micro_batch=8, length=512, steps=20, batching="padded")
    lengths = [len(row) for row in work.rows(range(600))]
    batches = [lengths[start : start + 8] for start in range(0, 160, 8)]
    assert work.tokens_of_steps(lengths) == [sum(batch) for batch in batches]
    assert all(batch == sorted(batch, reverse=True) for batch in batches)
    assert sum(len(batch) * batch[0] for batch in batches) < 1.3 * sum(map(sum, batches))


def test_clock_and_power_are_those_of_the_steps() -> None:
    idle, steps = ["345, 70.1"] * 9, ["1755, 690.0", "1695, 700.0", "1725, 680.0"]
    assert at_work("\n".join([*idle, *steps, "[N/A], [N/A]", ""])) == {"sm_mhz": 1725.0, "watts": 690.0}
    assert at_work("") == {}


@pytest.mark.parametrize("row", sorted(OF_ROWS))
def test_each_row_is_a_command_line_that_finetuning_takes(row: str) -> None:
    workload = WORKLOADS[OF_ROWS[row]]
    config = parse_flags(workload.words(Path("model"), Path("run"), 30, same_work(workload)))
    assert config.train_config.lr == 1e-4
    assert "--use_peft" not in workload.flags or config.lora_config.lora_dropout == 0
