import gc
import threading

import pytest
import torch

import ebb
from conftest import assert_same, data, gradients, new_model


def leaf(elements=256):
    return torch.linspace(-1, 1, elements, requires_grad=True)


def moved(offloader):
    return offloader.stats().offloaded.tensors


def test_a_step_is_exact_whether_backward_is_inside_of_the_guard_or_outside(offloader):
    def outside(guard):
        model = new_model()
        with guard:
            loss = model(data()).square().mean()
        loss.backward()
        return [loss, *gradients(model)]

    def inside(guard):
        model = new_model()
        with guard:
            loss = model(data()).square().mean()
            loss.backward()
        return [loss, *gradients(model)]

    assert_same(outside, offloader)
    assert_same(inside, offloader)


def test_twenty_steps_of_an_optimizer_are_exact(offloader):
    def training(guard):
        model = new_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(20):
            optimizer.zero_grad()
            with guard:
                loss = model(data(8 + step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return [*losses, *model.parameters()]

    assert_same(training, offloader)
    assert offloader.stats().steps == 20


def test_no_offload_leaves_saves_alone(offloader):
    with offloader:
        with ebb.no_offload():
            loss = leaf().exp().sum()
    assert offloader.stats().saved.tensors == 0
    loss.backward()


def test_the_innermost_guard_wins(offloader):
    other = ebb.Offloader("cpu", ebb.policies.offload_everything())
    with offloader:
        first = leaf().exp()
        with other:
            second = leaf().exp()
            with ebb.no_offload():
                third = leaf().exp()
                with offloader:
                    fourth = leaf().exp()
        fifth = leaf().exp()
    assert moved(offloader) == 3
    assert moved(other) == 1
    (first + second + third + fourth + fifth).sum().backward()


def test_one_offloader_nests_in_itself(offloader):
    with offloader, offloader, offloader:
        a = leaf().exp()
    b = leaf().exp()
    assert moved(offloader) == 1
    (a + b).sum().backward()


def test_a_guard_ends_when_its_block_raises(offloader):
    with pytest.raises(ZeroDivisionError):
        with offloader, ebb.no_offload():
            1 / 0
    x = leaf().exp()
    assert offloader.stats().saved.tensors == 0
    x.sum().backward()


def test_the_end_of_a_guard_on_another_thread_is_a_runtime_error(offloader):
    offloader.__enter__()
    caught = []

    def end():
        try:
            offloader.__exit__(None, None, None)
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    offloader.__exit__(None, None, None)
    assert "begun" in str(caught[0])


def test_a_guard_is_its_threads_own(offloader):
    def other():
        leaf().exp().sum().backward()

    with offloader:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert offloader.stats().saved.tensors == 0


def test_four_threads_that_share_an_offloader_are_exact(offloader):
    def step(guard, model):
        with guard:
            loss = model(data()).square().mean()
        loss.backward()
        return [loss.detach(), *gradients(model)]

    import contextlib
    import copy

    model = new_model().eval()

    expected = step(contextlib.nullcontext(), copy.deepcopy(model))
    found = []

    def train():
        for _ in range(10):
            found.append(step(offloader, copy.deepcopy(model)))

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40
    for each in found:
        assert all(torch.equal(a, b) for a, b in zip(each, expected, strict=True))
    assert moved(offloader) > 0


def test_an_offloader_may_end_before_backward():
    def step(guard):
        model = new_model()
        with guard:
            loss = model(data()).square().mean()
        nonlocal offloader
        offloader = guard = None
        gc.collect()
        loss.backward()
        return [loss, *gradients(model)]

    import contextlib

    from conftest import results

    offloader = None
    plain = results(step, contextlib.nullcontext())
    ours = results(step, ebb.Offloader("cpu", ebb.policies.offload_everything()))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_a_graph_that_is_dropped_gives_its_memory_back(offloader):
    with offloader:
        loss = new_model()(data()).square().mean()
    assert offloader.stats().pool.now_bytes > 0
    del loss
    gc.collect()
    assert offloader.stats().pool.now_bytes == 0


def test_a_write_to_a_saved_tensor_is_torchs_error(offloader):
    with offloader:
        x = leaf().exp()
        y = x.sin()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_backward_twice_without_retain_graph_is_torchs_error(offloader):
    with offloader:
        loss = leaf().exp().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_parameters_and_excluded_tensors_are_never_moved(offloader):
    buffer = torch.ones(64, 64)
    frozen = torch.nn.Linear(64, 64).requires_grad_(False)
    offloader.exclude(buffer, frozen)
    x = torch.ones(64, 64, requires_grad=True)
    with offloader:
        loss = frozen(x @ buffer).sum()
    assert offloader.stats().kept["excluded"].tensors == 2
    assert moved(offloader) == 0
    loss.backward()
    with pytest.raises(TypeError, match="exclude"):
        offloader.exclude("weights")


def test_a_graph_that_is_traversed_by_hand_gives_what_was_saved(offloader):
    x = leaf()
    y = x * 2
    with offloader:
        z = y.sin()
    assert torch.equal(z.grad_fn._saved_self, y)
    z.sum().backward()


def test_no_offload_may_be_entered_inside_of_itself(offloader):
    kept = ebb.no_offload()
    x = leaf()
    with offloader:
        with kept:
            with kept:
                x.exp()
            still_kept = x.exp()
        assert moved(offloader) == 0
        x.exp()
    assert moved(offloader) == 1
    still_kept.sum().backward()


def test_a_look_at_a_storage_does_not_keep_it_from_eviction():
    def evicted(look):
        offloader = ebb.Offloader("cpu", ebb.policies.keep_everything(1))
        layers = [torch.nn.Linear(64, 64) for _ in range(4)]
        with offloader:
            x = torch.ones(16, 64)
            for layer in layers:
                x = torch.tanh(layer(x))
                if look:
                    x.untyped_storage().nbytes()
            loss = x.sum()
        del x
        return offloader.evict("1GB"), loss.backward()

    assert evicted(look=True) == evicted(look=False)
