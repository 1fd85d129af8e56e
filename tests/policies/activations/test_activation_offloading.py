"""What layers keep waits in host memory: the same bits, nothing used before its copy is there, nothing left over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

import finetuning
import policies.activations.offloading
from configs.flags import parse_flags
from policies.activations.checkpointing import Checkpointing, checkpoint_layers
from policies.activations.host_pool import CHUNK_BYTES, PAGE_BYTES, HostPool
from policies.activations.offloading import Offloading, num_offloaded
from policies.activations.transfers import HostTransfers, StreamTransfers, Transfers, transfers_for
from policies.pinned_memory import pinned_region
from policies.wrapping import find_layers
from tests.helpers.generated import flags, write_rows
from tests.helpers.pairwise import slow_but
from tests.helpers.processes import ProcessGroup, read_metrics
from tests.helpers.small_configs import SMALL, VOCAB
from utils.errors import ConfigError

CPU = torch.device("cpu")
NUM_LAYERS = 4
ROWS, WIDTH = 2, 64
HIDDEN_BYTES = ROWS * WIDTH * SMALL["hidden_size"] * 4


class LateTransfers(HostTransfers):
    """Copies as late as a stream may: when they are waited for. Until then what was asked for holds other bytes."""

    def __init__(self) -> None:
        self.num_to_host = self.num_to_device = self.num_bytes = 0

    def to_host(self, storages: Sequence[torch.UntypedStorage]) -> tuple[list[torch.Tensor], Any]:
        copies = [torch.full((storage.nbytes(),), 0xFF, dtype=torch.uint8) for storage in storages]
        self.num_to_host += len(copies)
        self.num_bytes += sum(map(len, copies))
        return copies, [(weakref.ref(storage), copy, True) for storage, copy in zip(storages, copies, strict=True)]

    def to_device(self, copies: Sequence[torch.Tensor]) -> tuple[list[torch.UntypedStorage], Any]:
        arriving = [torch.full_like(copy, 0xFF) for copy in copies]
        self.num_to_device += len(copies)
        storages = [tensor.untyped_storage() for tensor in arriving]
        return storages, [(weakref.ref(storage), copy, False) for storage, copy in zip(storages, copies, strict=True)]

    def wait(self, copied: Any) -> None:
        for ref, copy, is_leaving in copied:
            storage = ref()
            assert storage is not None, "device memory was given back while a copy was under way"
            on_device = torch.empty(0, dtype=torch.uint8).set_(storage)
            source, target = (on_device, copy) if is_leaving else (copy, on_device)
            target.copy_(source)
        copied.clear()


class HeldBytes(TorchDispatchMode):
    """The bytes that tensors made in this context hold still.

    Args:
        beside: tensors that do not count.
    """

    def __init__(self, beside: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[Any]] = {}
        self.beside = {tensor.untyped_storage()._cdata for tensor in beside}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self.storages[tensor.untyped_storage()._cdata] = weakref.ref(tensor.untyped_storage())
        return outputs

    def held(self, *, but: Set[int] = frozenset()) -> int:
        alive = ((key, ref()) for key, ref in self.storages.items() if key not in self.beside | but)
        return sum(storage.nbytes() for _, storage in alive if storage is not None)


@pytest.fixture(autouse=True)
def small_tensors_move_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies.activations.offloading, "MIN_BYTES", HIDDEN_BYTES)


def make_model(
    mode: Checkpointing, transfers: Transfers | None, *, backend: Any = None, num_moved: int = NUM_LAYERS - 1
) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL | {"num_hidden_layers": NUM_LAYERS}))
    layers = find_layers(model)
    checkpoint_layers(layers, mode)
    if backend is not None:
        for layer in layers:
            layer.compile(backend=backend, fullgraph=True)
    if transfers is not None:
        offloading = Offloading(CPU, transfers)
        offloading.wrap(layers[::-1])
        offloading.move(num_moved, [mode for _, mode in mode.of(layers)])
    return model.train()


def loss_of(model: Any) -> torch.Tensor:
    ids = torch.randint(3, VOCAB, (ROWS, WIDTH), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def gradients(model: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture
def wanted() -> list[torch.Tensor]:
    return gradients(make_model(Checkpointing("off"), None))


@pytest.mark.parametrize("num_moved", range(NUM_LAYERS))
@pytest.mark.parametrize("mode", ["full", "selective", "off"])
def test_gradients_are_the_same_bits_however_late_a_copy_is(
    mode: str, num_moved: int, wanted: list[torch.Tensor]
) -> None:
    transfers = LateTransfers()
    model = make_model(Checkpointing(mode), transfers, num_moved=num_moved)
    for _ in range(2):
        assert all(map(torch.equal, gradients(model), wanted))
    # What has left comes back, once.
    assert transfers.num_to_device == transfers.num_to_host
    if mode != "off":  # of checkpointed layers the input moves
        assert transfers.num_bytes == 2 * num_moved * HIDDEN_BYTES


def test_layers_of_different_modes_give_the_same_bits(wanted: list[torch.Tensor]) -> None:
    transfers = LateTransfers()
    model = make_model(Checkpointing("off", "full", 1), transfers, num_moved=2)
    for _ in range(2):
        assert all(map(torch.equal, gradients(model), wanted))
    assert transfers.num_bytes > 2 * 2 * HIDDEN_BYTES  # the second layer moves all that it keeps


def test_copies_pass_through_pages_of_a_pool_that_a_second_step_uses_again(wanted: list[torch.Tensor]) -> None:
    transfers = HostTransfers()
    model = make_model(Checkpointing("off"), transfers)
    for _ in range(2):
        assert all(map(torch.equal, gradients(model), wanted))
        assert transfers.pool.num_bytes == CHUNK_BYTES
        assert len(transfers.pool._free) * PAGE_BYTES == CHUNK_BYTES  # all pages came back


def test_an_evaluation_and_a_forward_without_backward_between_steps_change_nothing(wanted: list[torch.Tensor]) -> None:
    transfers = LateTransfers()
    model = make_model(Checkpointing("full"), transfers)
    loss_of(model)
    with torch.no_grad():
        moved = transfers.num_to_host
        loss_of(model)
        assert transfers.num_to_host == moved
    assert all(map(torch.equal, gradients(model), wanted))


def held_after_forward(transfers: HostTransfers | None, num_moved: int = NUM_LAYERS - 1) -> int:
    model = make_model(Checkpointing("full"), transfers, num_moved=num_moved)
    if transfers is not None:
        transfers.pool.take(1)
    pools = [] if transfers is None else [chunk.memory for chunk in transfers.pool._chunks]
    with HeldBytes([*model.parameters(), *model.buffers(), *pools]) as counter:
        loss = loss_of(model)
        held = counter.held()
        loss.backward()
        del loss
        model.zero_grad()
    gc.collect()
    assert counter.held() == 0  # of what was made in this step
    return held


@pytest.mark.parametrize("num_moved", range(1, NUM_LAYERS))
def test_the_device_holds_what_the_other_layers_keep_and_nothing_outlives_the_step(num_moved: int) -> None:
    without, moved = held_after_forward(None), held_after_forward(HostTransfers(), num_moved)
    assert without - moved == num_moved * HIDDEN_BYTES


@pytest.mark.parametrize("mode", ["full", "off"])
def test_compiled_layers_share_one_graph_with_the_same_gradients(mode: str, wanted: list[torch.Tensor]) -> None:
    torch._dynamo.reset()
    counter, transfers = CompileCounterWithBackend("aot_eager"), LateTransfers()
    model = make_model(Checkpointing(mode), transfers, backend=counter)
    for _ in range(2):
        found = gradients(model)
    assert counter.frame_count == 1
    assert transfers.num_to_host >= 2 * (NUM_LAYERS - 1)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def train_moving_all(argv: Sequence[str]) -> int:
    """A run whose small tensors are moved, too."""
    policies.activations.offloading.MIN_BYTES = 1
    transfers: Any = StreamTransfers if torch.cuda.is_available() else HostTransfers
    moved, move = [], transfers.to_host

    def count(self: Transfers, storages: Sequence[torch.UntypedStorage]) -> tuple[Sequence[Any], Any]:
        moved.extend(storage.nbytes() for storage in storages)
        return move(self, storages)

    transfers.to_host = count
    status = finetuning.main(argv)
    assert bool(moved) == ("--activation_offloading" in argv)
    return status


@pytest.mark.parametrize(
    ("ranks", "given"), slow_but(1, [(1, "--use_peft --activation_checkpointing off"), (2, "--enable_fsdp")])
)
def test_runs_have_the_same_losses_to_the_bit(
    ranks: int, given: str, tiny_model: Path, tmp_path: Path, process_group: ProcessGroup
) -> None:
    if 0 < torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, or none")
    data = write_rows(tmp_path)
    given += " --context_length 64 --max_train_step 2 --gradient_accumulation_steps 2 --save_model False"
    losses = []
    for more in ([], ["--activation_offloading"]):
        folder = tmp_path / f"run{len(losses)}"
        argv = flags(tiny_model, data, folder, *given.split(), *more)
        outcomes = process_group.train(partial(train_moving_all, argv), ranks)
        losses.append([(e["loss"], e["grad_norm"]) for e in read_metrics(folder) if e["event"] == "train"])
    assert losses[0] == losses[1]
    assert ("activation_offloading: the device is the host itself" in outcomes[0].stdout) != torch.cuda.is_available()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize(("num_moved", "num_chunks"), [(2, 2), (5, 3)])  # of 136 MiB each, in chunks of 256 MiB
def test_copies_on_a_stream_of_their_own_give_the_same_bits_and_pin_nothing_after_the_first_step(
    num_moved: int, num_chunks: int
) -> None:
    device = torch.device("cuda")
    layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512)) for _ in range(6))
    layers.to(device)
    inputs = torch.randn(4096, 512, device=device)

    def step() -> list[torch.Tensor]:
        hidden = inputs
        for layer in layers:
            hidden = layer(hidden)
        return list(torch.autograd.grad(hidden.square().sum(), [*layers.parameters()]))

    wanted = step()
    transfers: Any = transfers_for(device, 1)
    offloading = Offloading(device, transfers)
    offloading.wrap(list(layers))
    offloading.move(num_moved, ["off"] * len(layers), 2**29)
    num_bytes = []
    for _ in range(5):  # memory of earlier steps is used again, on both sides
        assert all(map(torch.equal, step(), wanted))
        num_bytes.append(transfers.pool.num_bytes)
    assert len(set(num_bytes[1:])) == 1
    assert num_bytes[-1] == num_chunks * CHUNK_BYTES


@needs_gpu
def test_a_pool_of_pinned_memory_holds_the_bytes_of_the_device() -> None:
    transfers = StreamTransfers(torch.device("cuda"), HostPool(pinned_region, 2))
    numbers = [torch.randint(256, (size,), dtype=torch.uint8, device="cuda") for size in (1, PAGE_BYTES, 2**28 + 5)]
    copies, copied = transfers.to_host([one.untyped_storage() for one in numbers])
    transfers.wait(copied)
    arrived, copied = transfers.to_device(copies)
    transfers.wait(copied)
    for one, storage in zip(numbers, arrived, strict=True):
        assert torch.equal(torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)[: len(one)], one)


def test_more_layers_than_there_are_cannot_be_moved() -> None:
    def moved(number: str) -> int:
        given = ["--model_name", "m", "--activation_offloading", "--num_offloaded_layers", number]
        return num_offloaded(parse_flags(given).train_config, 3, chosen=None)

    assert [moved(number) for number in "123"] == [1, 2, 2]
    with pytest.raises(ConfigError, match="--num_offloaded_layers: 4 layers to offload, but this model has 3"):
        moved("4")
