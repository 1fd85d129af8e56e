"""Runs in float8, emulated on CPUs: they learn as in bf16, resume bit for bit, and leave weights as any run does."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointing.tensor_files import TensorFiles
from policies.weights.stored import Entry
from run_folder.checkpoint_folder import checkpoints, tensor_files
from tests.helpers.made import Made
from tests.helpers.processes import ProcessGroup, train_events
from tests.helpers.refusals import Bench
from tests.helpers.resuming import as_if_killed_after, assert_bit_equal, flags_of, weights
from tools.make_tiny_model import make_tiny_model

FSDP = ["--enable_fsdp"]
TENSORWISE, ROWWISE = ["--float8", "tensorwise"], ["--float8", "rowwise"]
MIXED, TRUE = ["--mixed_precision", "True"], ["--pure_bf16"]
LORA = ["--use_peft", "--lora_config.lora_dropout", "0", *MIXED]
RUNS: dict[str, tuple[int, list[str]]] = {
    "bf16": (2, [*FSDP, *MIXED]),
    "tensorwise": (2, [*FSDP, *MIXED, *TENSORWISE]),
    "rowwise": (2, [*FSDP, *MIXED, *ROWWISE]),
    "one rank": (1, [*MIXED, *TENSORWISE]),
    "NO_SHARD": (2, [*MIXED, *TENSORWISE]),
    "HYBRID_SHARD": (4, [*FSDP, "--hsdp", "--sharding_group_size", "2", *MIXED, *TENSORWISE]),
    "compiled": (2, [*FSDP, *MIXED, *TENSORWISE, "--compile", "--activation_checkpointing", "selective"]),
    "Kahan": (2, [*FSDP, *TRUE, *TENSORWISE, "--optimizer", "anyprecision", "--use_kahan_summation"]),
    "LoRA": (2, [*FSDP, *LORA, *TENSORWISE]),
    "LoRA, bf16": (2, [*FSDP, *LORA]),
}


@pytest.fixture(scope="module")
def runs(tiny_model: Path, process_group: ProcessGroup, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The folder of each run, by its name in RUNS."""

    def run(name: str) -> Path:
        if "--use_peft" not in RUNS[name][1] and "--float8" in RUNS[name][1]:
            pytest.importorskip("torchao.float8")
        ranks, flags = RUNS[name]
        folder = tmp_path_factory.mktemp("float8") / "run"
        process_group.train(flags_of(tiny_model, folder, *flags), ranks)
        return folder

    return Made(run)


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in train_events(folder)]


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("tensorwise", "bf16"),
        pytest.param("LoRA", "LoRA, bf16", marks=pytest.mark.slow),
        *(pytest.param(name, "bf16", marks=pytest.mark.slow) for name in ("one rank", "NO_SHARD", "HYBRID_SHARD")),
        pytest.param("compiled", "bf16", marks=[pytest.mark.slow, pytest.mark.full]),  # a minute or more
    ],
)
def test_losses_are_near_those_of_bf16(name: str, plain: str, runs: Made) -> None:
    found, wanted = losses(runs[name]), losses(runs[plain])
    assert found != wanted
    assert found == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("name", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_checkpoints_and_exports_hold_what_they_hold_without_float8(name: str, runs: Made) -> None:
    def kinds(folder: Path) -> dict[str, Entry]:
        return TensorFiles(tensor_files(checkpoints(folder / "checkpoints")[-1])).kinds

    assert kinds(runs[name]) == kinds(runs["bf16"])
    found, wanted = weights(runs[name]), weights(runs["bf16"])
    assert {key: tensor.dtype for key, tensor in found.items()} == {key: t.dtype for key, t in wanted.items()}
    assert {key: tensor.shape for key, tensor in found.items()} == {key: t.shape for key, t in wanted.items()}


@pytest.mark.parametrize(
    "name", ["tensorwise", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one rank", "Kahan", "LoRA"))]
)
def test_a_resumed_run_goes_on_bit_for_bit(
    name: str, runs: Made, tiny_model: Path, process_group: ProcessGroup, tmp_path: Path
) -> None:
    ranks, flags = RUNS[name]
    folder = as_if_killed_after(3, runs[name], tmp_path / "run")
    process_group.train([*flags_of(tiny_model, folder, *flags), "--resume", "auto"], ranks)
    assert_bit_equal(folder, runs[name])


def test_what_cannot_run_in_float8_is_refused_before_weights_are_read(bench: Bench) -> None:
    pytest.importorskip("torchao.float8")
    assert bench.refused(*TENSORWISE).startswith(
        "error: --float8: the rest of the model must compute in bf16, and this "
    )
    model = make_tiny_model(
        bench.folder / "odd", tie_word_embeddings=False, vocab_size=600, hidden_size=40, num_layers=1
    )
    line = bench.refused("--model_name", str(model), *TRUE, *TENSORWISE)
    assert line.startswith(
        "error: --float8: no linear layer of LlamaForCausalLM is suited (q_proj (40 x 40, no multiples"
    )


@pytest.mark.slow
def test_direct_collectives_leave_rounded_weights_packed(
    tiny_model: Path, tmp_path: Path, process_group: ProcessGroup, runs: Made
) -> None:
    packed, direct = runs["tensorwise"], tmp_path / "direct"
    outcomes = process_group.train(flags_of(tiny_model, direct, *RUNS["tensorwise"][1], "--direct_collectives"), 2)
    assert_bit_equal(direct, packed)
    assert (
        "direct_collectives: weights of 2 of 4 units are gathered, and gradients of 0 of 4 reduced, without packing "
        "(gradients are cast to be summed in fp32; float8 rounds weights before they are gathered)"
    ) in outcomes[0].stdout
