import copy
import pickle
import threading
import warnings

import pytest
import torch

import ebb
from conftest import Model, data, gradients, new_model

EVERYTHING = {"device": "cpu", "policy": ebb.policies.offload_everything()}


def leaf():
    return torch.ones(64, requires_grad=True)


def unguarded(offloader):
    """Whether a save made now is nobody's."""
    before = offloader.stats().saved.tensors
    leaf().exp().sum().backward()
    return offloader.stats().saved.tensors == before


def train(model, steps=5):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    torch.manual_seed(2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(data()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def test_a_loop_that_knows_nothing_of_ebb_is_exact():
    model = new_model()
    offloader = ebb.wrap(model, **EVERYTHING)
    assert all(torch.equal(a, b) for a, b in zip(train(model), train(new_model()), strict=True))
    assert offloader.stats().offloaded.tensors > 0
    assert offloader.stats().steps == 5
    assert offloader.stats().pool.now_bytes == 0
    assert unguarded(offloader)


def saves_of(keep, run=lambda model: model(data())):
    model = new_model()
    offloader = ebb.wrap(model, keep=keep, **EVERYTHING)
    run(model).square().mean().backward()
    assert unguarded(offloader)
    return offloader.stats().saved.tensors


def test_the_usual_heads_are_kept_and_so_are_named_parts():
    everything = saves_of([])
    assert saves_of(None) == saves_of(["head"]) < everything
    assert saves_of(["body.0", "head"]) < saves_of(["head"])


class WithLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = new_model()
        self.lm_head = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.lm_head(self.inner.body(x)[:, :4]).log_softmax(1).exp().sum()


def test_what_comes_after_a_head_in_the_same_forward_stays():
    kept = ebb.wrap(model := WithLoss(), **EVERYTHING)
    model(data()).backward()
    moved = ebb.wrap(model := WithLoss(), keep=[], **EVERYTHING)
    model(data()).backward()
    # The head's two inputs (one of them a parameter), and the results of log_softmax and exp.
    assert moved.stats().saved.tensors - kept.stats().saved.tensors >= 3


def test_a_kept_part_in_a_list_keeps_its_own_saves_only():
    class Listed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Tanh() for _ in range(4)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.sum()

    model = Listed()
    offloader = ebb.wrap(model, keep=["blocks.1"], **EVERYTHING)
    model(leaf()).backward()
    assert offloader.stats().saved.tensors == 3


def test_a_head_that_is_called_by_itself_leaves_no_guard_behind():
    model = new_model()
    offloader = ebb.wrap(model, **EVERYTHING)
    with offloader:
        model.head(torch.ones(2, 32)).sum().backward()
        before = offloader.stats().saved.tensors
        leaf().exp().sum().backward()
        assert offloader.stats().saved.tensors == before + 1
    assert unguarded(offloader)


def test_a_model_without_a_head_gets_a_warning_that_says_what_to_do():
    with pytest.warns(UserWarning, match=r"keep=\["):
        ebb.wrap(torch.nn.Sequential(torch.nn.Linear(4, 4)), **EVERYTHING)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ebb.wrap(torch.nn.Sequential(torch.nn.Linear(4, 4)), keep=[], **EVERYTHING)
        ebb.wrap(new_model(), **EVERYTHING)


def test_parts_of_repeated_blocks_are_no_heads():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.output = torch.nn.Linear(4, 4)

    with pytest.warns(UserWarning, match="no module named"):
        ebb.wrap(torch.nn.Sequential(Block(), Block()), **EVERYTHING)


def test_names_that_are_not_there_are_value_errors():
    with pytest.raises(ValueError, match="lm_head"):
        ebb.wrap(new_model(), keep=["lm_head"], **EVERYTHING)
    with pytest.raises(TypeError, match="list"):
        ebb.wrap(new_model(), keep="head", **EVERYTHING)
    with pytest.raises(TypeError, match="torch.nn.Module"):
        ebb.wrap(lambda x: x, **EVERYTHING)
    with pytest.raises(ValueError, match="device_budget"):
        ebb.wrap(new_model(), device="cpu", device_budget="many")


class Fails(Model):
    where = "body"
    error = RuntimeError

    def forward(self, x):
        x = self.body(x)
        if self.where == "body":
            raise self.error("body")
        x = self.head(x)
        raise self.error("after the head")


@pytest.mark.parametrize("where", ["body", "after the head"])
@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_forward_that_raises_leaves_no_guard_behind(where, error):
    model = Fails()
    model.where, model.error = where, error
    offloader = ebb.wrap(model, **EVERYTHING)
    for _ in range(2):
        with pytest.raises(error, match=where):
            model(data())
        assert unguarded(offloader)


def test_a_forward_that_is_interrupted_leaves_no_guard_after_the_next():
    model = Fails()
    model.error = KeyboardInterrupt
    offloader = ebb.wrap(model, **EVERYTHING)
    with pytest.raises(KeyboardInterrupt):
        model(data())
    model.error = RuntimeError
    with pytest.raises(RuntimeError):
        model(data())
    assert unguarded(offloader)


def test_a_hook_that_refuses_the_forward_leaves_no_guard_behind():
    def refuse(module, inputs):
        raise LookupError

    model = new_model()
    model.register_forward_pre_hook(refuse)
    offloader = ebb.wrap(model, **EVERYTHING)
    with pytest.raises(LookupError):
        model(data())
    assert unguarded(offloader)
    model = new_model()
    model.head.register_forward_pre_hook(refuse)
    offloader = ebb.wrap(model, **EVERYTHING)
    with pytest.raises(LookupError):
        model(data())
    assert unguarded(offloader)


def test_a_model_that_two_threads_call_is_exact():
    model = new_model().eval()
    expected = model(data()).square().mean().detach()
    offloader = ebb.wrap(model, **EVERYTHING)
    losses = []

    def call():
        for _ in range(10):
            loss = model(data()).square().mean()
            torch.autograd.grad(loss, list(model.parameters()))
            losses.append(loss.detach())

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(losses) == 30
    assert all(torch.equal(loss, expected) for loss in losses)
    assert offloader.stats().offloaded.tensors > 0


def test_a_checkpointed_model_is_exact():
    from torch.utils.checkpoint import checkpoint

    for reentrant in (True, False):
        model = new_model()
        offloader = ebb.wrap(model, **EVERYTHING)
        torch.manual_seed(4)
        x = data().requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
        plain = new_model()
        torch.manual_seed(4)
        y = data().requires_grad_()
        plain(y).square().mean().backward()
        assert torch.equal(x.grad, y.grad)
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))
        assert unguarded(offloader)


@pytest.mark.parametrize("order", ["compiled, then wrapped", "wrapped, then compiled"])
@pytest.mark.parametrize("keep", [None, [], ["body.0"]])
def test_a_compiled_model_is_exact(order, keep):
    torch._dynamo.reset()
    model = new_model().eval()
    if order == "compiled, then wrapped":
        model = torch.compile(model, backend="aot_eager")
    offloader = ebb.wrap(model, keep=keep, **EVERYTHING)
    if order == "wrapped, then compiled":
        model = torch.compile(model, backend="aot_eager")
    plain = new_model().eval()
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        model(data()).square().mean().backward()
        plain(data()).square().mean().backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))
    assert offloader.stats().offloaded.tensors > 0
    assert unguarded(offloader)
    torch._dynamo.reset()


def test_a_deep_copy_is_wrapped_and_a_pickled_copy_is_not():
    model = new_model().eval()
    offloader = ebb.wrap(model, **EVERYTHING)

    def saves_of(module):
        before = offloader.stats().saved.tensors
        module(data()).sum().backward()
        return offloader.stats().saved.tensors - before

    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert saves_of(model) == saves_of(copied) > 0
    assert saves_of(loaded) == 0
    for other in (copied, loaded):
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(other), strict=True))
    again = ebb.wrap(loaded, **EVERYTHING)
    loaded(data())
    assert again.stats().offloaded.tensors > 0
