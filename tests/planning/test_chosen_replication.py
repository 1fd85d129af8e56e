"""How many layers' frozen weights stay whole on each GPU: as many as there is room for, if that is faster."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Ernie4_5_MoeConfig, LlamaConfig

from configs.flags import parse_flags
from planning.machines.cards import Card
from planning.machines.hardware import Hardware, parse_hardware
from planning.planned_run import Plan, plan_of
from policies.activations.checkpointing import Checkpointing
from utils.errors import ConfigError
from utils.units import GIB, readable

LORA = "--enable_fsdp --use_peft --compile False"
NUM_LAYERS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "vocab_size": 32000}
    LlamaConfig(**shape, num_hidden_layers=NUM_LAYERS, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


def planned(
    model: Path,
    given: str,
    *,
    cards: str = "2xA100-40GB",
    memory_gib: float | None = None,
    network_gbps: float | None = None,
    chosen: int | None = None,
) -> Plan:
    """On two machines if a network is given."""
    shape = "--batch_size_training 4 --context_length 2048 --run_validation False --tile_tokens 0"
    config = parse_flags(["--model_name", str(model), *shape.split(), *given.split()])
    nodes = 1 if network_gbps is None else 2
    hardware = parse_hardware(cards, device_memory_gib=memory_gib, nodes=nodes, network_gbps=network_gbps)
    return plan_of(config, hardware, num_replicated=chosen)


def number(plan: Plan) -> int:
    return plan.resolved.policies.layout.num_replicated or 0


def needed_gib(plan: Plan) -> float:
    """Memory of a card on which this plan has just enough room."""
    return (plan.memory.peak_gib + plan.memory.overhead_gib) / 0.949


def test_each_layer_costs_the_other_ranks_part_of_it_and_is_not_gathered(model: Path) -> None:
    base = sum(p.nbytes for p in planned(model, LORA).model.adapted.model.parameters() if not p.requires_grad)
    none, some, both = (planned(model, f"{LORA} --num_replicated_layers {n}") for n in (0, 4, NUM_LAYERS))
    assert both.memory.phases["optimizer_step"].params - none.memory.phases["optimizer_step"].params == pytest.approx(
        base / GIB / 2, rel=0.01
    )
    times = [plan.time for plan in (none, some, both)]
    communicated = [time.communication_seconds for time in times if time is not None]
    assert communicated[2] < 0.1 * communicated[0], "adapters alone"
    assert communicated[2] < communicated[1] < communicated[0]
    (line,) = (line for line in both.choices if "num_replicated_layers" in line)
    assert line.startswith(f"num_replicated_layers: 8 of 8: {readable(base)} of frozen weights stay whole on each rank")


def test_as_many_as_there_is_room_for(model: Path) -> None:
    off = f"{LORA} --activation_checkpointing off"
    assert number(planned(model, off)) == NUM_LAYERS
    for wanted in (1, 5, NUM_LAYERS):
        memory_gib = needed_gib(planned(model, f"{off} --num_replicated_layers {wanted}"))
        found = planned(model, off, memory_gib=memory_gib)
        assert number(found) == wanted
        assert found.memory.verdict == "fits"
        assert found.choices[-1].startswith(f"num_replicated_layers: auto is {wanted} of 8")
        # The rest of the run, or its report of missing memory, is planned with what was chosen.
        assert number(planned(model, off, memory_gib=memory_gib, chosen=0)) == 0
    assert number(planned(model, off, memory_gib=needed_gib(planned(model, f"{off} --num_replicated_layers 0")))) == 0


def test_the_faster_of_gathering_and_recomputing_is_taken(model: Path) -> None:
    """On a card with room for whole weights, or for all activations, and not for both."""
    off, full = (f"{LORA} --activation_checkpointing {mode}" for mode in ("off", "full"))
    least = needed_gib(planned(model, f"{off} --num_replicated_layers 0"))
    memory_gib = max(least, needed_gib(planned(model, f"{full} --num_replicated_layers {NUM_LAYERS}"))) + 0.2
    taken = set()
    for cards, network_gbps in (("2xA100-80GB", None), ("1xA100-80GB", 1.0)):
        lines = [LORA, *(f"{LORA} --num_replicated_layers {n}" for n in (0, NUM_LAYERS))]
        plans = [planned(model, x, cards=cards, memory_gib=memory_gib, network_gbps=network_gbps) for x in lines]
        assert all(plan.memory.verdict == "fits" for plan in plans)
        seconds = [plan.time.seconds_per_step for plan in plans if plan.time is not None]
        assert seconds[0] <= min(seconds)
        taken.add((number(plans[0]) == NUM_LAYERS, plans[0].model.empty.checkpointing == Checkpointing("off")))
    assert taken == {(False, True), (True, False)}


@pytest.mark.parametrize(
    ("given", "cards"),
    [
        ("--enable_fsdp --pure_bf16", "2xA100-40GB"),  # nothing is frozen
        ("--enable_fsdp --freeze_layers", "2xA100-40GB"),  # weights are cast as they are gathered
        (f"{LORA} --sharding_strategy NO_SHARD", "2xA100-40GB"),
        (f"{LORA} --fsdp_cpu_offload", "2xA100-40GB"),
        (LORA, "A100-40GB"),
    ],
)
def test_elsewhere_none_is(given: str, cards: str, model: Path) -> None:
    found = planned(model, given, cards=cards)
    assert number(found) == 0
    assert not any("num_replicated_layers" in line for line in found.notes)


def test_frozen_biases_of_routers_are_not_worth_it(tmp_path: Path) -> None:
    """ERNIE's, of which auto made a run that gathers all of its trained layers at once."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 4096}
    architectures = ["Ernie4_5_MoeForCausalLM"]
    Ernie4_5_MoeConfig(**shape, num_hidden_layers=2, architectures=architectures).save_pretrained(tmp_path)
    found = planned(tmp_path, "--enable_fsdp --pure_bf16")
    assert any(not parameter.requires_grad for parameter in found.model.adapted.model.parameters())
    assert number(found) == 0


def test_on_a_cpu_none_is_unless_asked_for(model: Path) -> None:
    hardware = Hardware(Card("CPU", 64.0, is_gpu=False), cards_per_node=2)
    for more, wanted in (("", 0), ("--num_replicated_layers 2", 2)):
        given = f"--model_name {model} --context_length 64 {LORA} {more}"
        assert number(plan_of(parse_flags(given.split()), hardware)) == wanted


def test_kept_gathered_weights_take_less_memory_whole(model: Path) -> None:
    given = f"{LORA} --sharding_strategy SHARD_GRAD_OP"
    none, all_ = (planned(model, f"{given} --num_replicated_layers {n}").memory.peak_gib for n in (0, NUM_LAYERS))
    assert all_ < none
    assert number(planned(model, given)) == NUM_LAYERS


def test_weights_that_are_cast_cannot_stay_whole(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--num_replicated_layers: bf16-mixed casts weights"):
        planned(model, "--enable_fsdp --freeze_layers --num_replicated_layers 1")
