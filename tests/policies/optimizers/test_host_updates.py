"""The order in which a thread updates weights, and when weights return to those who read them."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import policies.optimizers.host_optimizer as host_optimizer
from policies.guarded_step import guarded_step
from policies.loss_scaling import LossScaler
from policies.optimizers.host_optimizer import last_gradients, wait_for_weights
from policies.optimizers.host_updates import Bucket, HostUpdates
from policies.optimizers.offload import CPUOffloadOptimizer

SECONDS = 30.0  # after which a thread that waits has hung


class Recorder:
    """Work that ends when it is let go."""

    def __init__(self) -> None:
        self.goes_on, self.began = threading.Semaphore(0), threading.Semaphore(0)
        self.updated, self.returned, self.measured = list[int](), list[int](), list[int]()

    def measure(self, bucket: Bucket) -> None:
        self.measured.append(bucket.place)

    def update(self, bucket: Bucket) -> None:
        self.began.release()
        assert self.goes_on.acquire(timeout=SECONDS)
        self.updated.append(bucket.place)

    def give_back(self, bucket: Bucket) -> None:
        self.returned.append(bucket.place)


def bucket_at(place: int) -> Bucket:
    return Bucket([], [], place, arrival=None)


def test_what_came_first_is_updated_first_until_the_step_is_decided_then_what_forward_needs_first() -> None:
    updates, work, buckets = HostUpdates(), Recorder(), [bucket_at(place) for place in (5, 4, 3, 2, 1)]
    updates.begin_step()
    for bucket in buckets:
        updates.add(bucket, work)
    work.goes_on.release()
    for _ in range(2):
        assert work.began.acquire(timeout=SECONDS)  # the second one is under way
    assert not work.returned  # the loss may not be finite
    updates.measure_first()
    updates.decide(work)
    work.goes_on.release(4)
    for bucket in buckets:
        assert bucket.returned.result(timeout=SECONDS) is None
    assert work.measured == [3, 2, 1]
    assert work.updated == [5, 4, 1, 2, 3] == work.returned


def test_a_dropped_step_returns_what_was_updated_and_leaves_the_rest() -> None:
    updates, work = HostUpdates(), Recorder()
    updates.begin_step()
    for place in (3, 2, 1):
        updates.add(bucket_at(place), work)
    work.goes_on.release(3)
    assert work.began.acquire(timeout=SECONDS)
    assert [bucket.place for bucket in updates.drop()] == work.updated
    assert not work.returned


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(6, 5, generator=torch.Generator().manual_seed(seed))).square().mean()
    return loss


def late(model: nn.Sequential, make: Any, *, begins_early: bool) -> CPUOffloadOptimizer:
    """Whose layers are all modules but the last one, which waits as the model does."""
    optimizer = CPUOffloadOptimizer([{"params": list(model.parameters())}], make, begins_early=begins_early)
    optimizer.return_late(model, list(model)[:-1])
    return optimizer


@pytest.mark.parametrize("begins_early", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 120, 2**28])
def test_steps_that_end_before_their_updates_are_those_of_the_plain_step(
    bucket_bytes: int, begins_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_optimizer, "BUCKET_BYTES", bucket_bytes)
    model, plain = make_model(), make_model()
    ours = late(model, lambda tensors: AdamW(tensors, lr=0.1, fused=True), begins_early=begins_early)
    theirs = AdamW(plain.parameters(), lr=0.1, fused=True)
    for step in range(8):
        for one, optimizer in ((model, ours), (plain, theirs)):
            optimizer.param_groups[0]["lr"] = 0.1 * 0.8**step
            for part in range(2):
                with last_gradients(optimizer, is_last=part == 1):
                    loss_of(one, 2 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
    wait_for_weights(ours)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, other)
        assert all(map(torch.equal, ours.state[parameter].values(), theirs.state[other].values()))


class Gated(SGD):
    """Steps on a weight once it is let through."""

    def __init__(self, tensors: Any) -> None:
        super().__init__(tensors, lr=0.1)
        self.let_through, self.is_open = threading.Semaphore(0), True

    def step(self, closure: Any = None) -> Any:
        assert self.is_open or self.let_through.acquire(timeout=SECONDS)
        return super().step()


def test_each_layer_waits_for_its_own_weights_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_optimizer, "BUCKET_BYTES", 1)
    model, plain = make_model(), make_model()
    for module in (*model, *plain):
        module.bias = None
    optimizer = late(model, Gated, begins_early=False)
    gate: Any = optimizer._optimizer
    other = SGD(plain.parameters(), lr=0.1)
    for step in range(2):  # the first one waits for all, since it makes states
        for one, kind in ((model, optimizer), (plain, other)):
            loss_of(one, step).backward()
            gate.is_open = step == 0
            before = [weight.detach().clone() for weight in one.parameters()]
            kind.step()
            kind.zero_grad()
            if kind is optimizer and step == 1:
                assert all(map(torch.equal, before, one.parameters()))
    read = []
    for layer in model:
        layer.register_forward_pre_hook(lambda module, _: read.append((module, module.weight.detach().clone())))
        layer.register_forward_pre_hook(lambda *_: gate.let_through.release())  # after it has waited for its own
    gate.let_through.release(2)  # those of the model, the last module's, come first; then those of the first layer
    model(torch.ones(1, 5))
    assert [module for module, _ in read] == list(model)
    for (_, weight), theirs in zip(read, plain.parameters(), strict=True):
        assert torch.equal(weight, theirs)
    wait_for_weights(optimizer)


def test_a_weight_of_several_layers_or_outside_of_them_is_waited_for_by_each_reader() -> None:
    model = make_model()
    model[1].weight = model[0].weight
    model[3].bias = model[2].bias
    readers = host_optimizer._readers(model, list(model)[:-1])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [[names[id(parameter)] for parameter in read] for _, read in readers] == [
        ["3.weight", "2.bias"],
        ["0.weight", "0.bias"],
        ["0.weight", "1.bias"],
        ["2.weight", "2.bias"],
    ]


def test_an_error_in_a_late_update_reaches_the_forward_pass() -> None:
    class Failing(SGD):
        num_steps = 0

        def step(self, closure: Any = None) -> Any:
            self.num_steps += 1
            if self.num_steps == 2:
                raise ValueError("no step")

    model = make_model()
    optimizer = late(model, lambda tensors: Failing(tensors, lr=0.1), begins_early=True)
    for step in range(2):
        with last_gradients(optimizer, is_last=True):
            loss_of(model, step).backward()
        optimizer.step()
    with pytest.raises(ValueError, match="no step"):
        loss_of(model, 2)


def test_a_hook_of_the_step_finds_updated_weights() -> None:
    model, seen = make_model(), list[torch.Tensor]()
    optimizer = late(model, lambda tensors: SGD(tensors, lr=0.1), begins_early=True)
    optimizer.register_step_post_hook(lambda *_: seen.append(model[0].weight.detach().clone()))
    for step in range(3):
        before = model[0].weight.detach().clone()
        with last_gradients(optimizer, is_last=True):
            loss_of(model, step).backward()
        optimizer.step()
        assert not torch.equal(seen[-1], before)
        assert torch.equal(seen[-1], model[0].weight)


def test_a_compiled_layer_waits_before_its_compiled_code() -> None:
    model, order = make_model(), list[str]()
    for layer in model:
        layer._compiled_call_impl = lambda states, layer=layer: order.append("computes") or layer.forward(states)
    optimizer = late(model, lambda tensors: SGD(tensors, lr=0.1), begins_early=False)
    waits = optimizer.wait_for
    optimizer.wait_for = lambda parameters: order.append("waits") or waits(parameters)  # type: ignore[method-assign]
    model(torch.ones(1, 5))
    assert order == ["waits", *3 * ["waits", "computes"], "computes"]  # the model, three layers, the last module


def test_a_step_that_is_left_out_changes_no_weight_and_hooks_own_no_optimizer() -> None:
    model = make_model()
    optimizer: Optimizer = late(model, lambda tensors: AdamW(tensors, lr=0.1, fused=True), begins_early=True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with last_gradients(optimizer, is_last=True):
        loss_of(model, 0).backward()

    def read() -> tuple[float, float]:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        guarded_step(optimizer, LossScaler(active=False), torch.tensor([1.0, float("nan")]), read)
    wait_for_weights(optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    alive = weakref.ref(optimizer)
    del optimizer
    assert alive() is None
    loss_of(model, 1)
