"""Modules that a plan may run again as a whole: compiled blocks, and those that the program names."""

import copy
import pickle

import pytest
import torch

import ebb

ROWS, WIDTH = 512, 256


class Kernel(torch.autograd.Function):
    """Writes without an operation, as a kernel of Triton's does."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        y.numpy().__imul__(3)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * 3 + y * 1e-6


class Block(torch.nn.Module):
    def __init__(self, norm=False, kernel=False):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.norm = torch.nn.BatchNorm1d(WIDTH) if norm else torch.nn.Identity()
        self.kernel = Kernel.apply if kernel else torch.nn.Identity()
        self.calls = 0

    def forward(self, x, cache=None):
        y = self.down(torch.nn.functional.gelu(self.kernel(self.up(self.norm(x)))))
        return x + torch.nn.functional.gelu(y)


class Model(torch.nn.Module):
    def __init__(self, blocks=4, **kinds):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(**kinds) for _ in range(blocks))
        self.lm_head = torch.nn.Linear(WIDTH, 8)

    def forward(self, x, cache=None):
        for block in self.blocks:
            x = block(x) if cache is None else block(x, cache)
        return self.lm_head(x).square().mean()


def model_of(compiled="call", **kinds):
    torch.manual_seed(0)
    model = Model(**kinds)
    for i, block in enumerate(model.blocks):
        if compiled == "call":
            block.compile(backend="aot_eager")
        elif compiled == "module":
            model.blocks[i] = torch.compile(block, backend="aot_eager")
    return model


def steps(model, count=7, **named):
    torch.manual_seed(1)
    found = []
    for _ in range(count):
        model.zero_grad()
        loss = model(torch.randn(ROWS, WIDTH), **named)
        loss.backward()
        state = [*(each.grad for each in model.parameters()), *model.buffers()]
        found.append([each.detach().clone() for each in (loss, *state)])
    return found


def assert_same(expected, found):
    for step, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)), f"step {step}"


# Of the host there is no room, so that what leaves the device is run again.
OPTIONS = {"device": "cpu", "least_memory": True, "capacity_bytes": 4096, "planned_minimum_bytes": 4096}


@pytest.mark.parametrize("compiled", ["call", "module"])
def test_compiled_blocks_are_run_again_by_themselves(compiled):
    expected = steps(model_of(compiled))
    model = model_of(compiled)
    offloader = ebb.wrap(model, **OPTIONS)
    assert_same(expected, steps(model))
    assert offloader.stats().recomputed.tensors > 0
    plain = model_of(compiled)
    without = ebb.wrap(plain, regions=[], **OPTIONS)
    assert_same(expected, steps(plain))
    assert without.stats().recomputed.tensors == 0
    assert offloader.plan_report().predicted.peak_bytes < without.plan_report().predicted.peak_bytes


def test_modules_are_run_again_by_name_whatever_they_launch():
    expected = steps(model_of(None, kernel=True))
    model = model_of(None, kernel=True)
    offloader = ebb.wrap(model, regions=["blocks.1", "blocks.2"], **OPTIONS)
    assert_same(expected, steps(model))
    assert offloader.stats().recomputed.tensors > 0


def test_blocks_that_write_to_their_buffers_are_not_run_again():
    expected = steps(model_of(norm=True))
    model = model_of(norm=True)
    offloader = ebb.wrap(model, **OPTIONS)
    assert_same(expected, steps(model))
    assert offloader.stats().recomputed.tensors == 0
    named = model_of(None, norm=True)
    ebb.wrap(named, regions=[f"blocks.{i}" for i in range(4)], **OPTIONS)
    assert_same(steps(model_of(None, norm=True)), steps(named))


def test_a_call_with_a_cache_is_only_a_call():
    class Cache:
        pass

    expected = steps(model_of(), cache=Cache())
    model = model_of()
    offloader = ebb.wrap(model, **OPTIONS)
    assert_same(expected, steps(model, cache=Cache()))
    assert offloader.stats().recomputed.tensors == 0


def test_regions_end_with_the_wrap_and_no_copy_has_them():
    model = model_of()
    calls = [block._compiled_call_impl for block in model.blocks]
    ebb.wrap(model, **OPTIONS)
    assert all(block._compiled_call_impl not in calls for block in model.blocks)
    steps(model, count=1)
    ebb.unwrap(model)
    assert [block._compiled_call_impl for block in model.blocks] == calls
    named = model_of(None)
    ebb.wrap(named, regions=["blocks.0"], **OPTIONS)
    assert all(block._compiled_call_impl is None for block in copy.deepcopy(named).blocks)
    assert all(block._compiled_call_impl is None for block in pickle.loads(pickle.dumps(named)).blocks)
    ebb.unwrap(named)
    assert named.blocks[0]._compiled_call_impl is None


def test_checkpointed_compiled_blocks_stay_as_they_are():
    def run(model):
        blocks = list(model.blocks)

        def step(x):
            for block in blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return model.lm_head(x).square().mean()

        model.forward = step
        return steps(model)

    expected = run(model_of())
    model = model_of()
    ebb.wrap(model, **OPTIONS)
    assert_same(expected, run(model))


@pytest.mark.parametrize("early", [False, True])
def test_under_a_plan_a_checkpoint_is_exact_with_other_hooks_and_guards_inside(early):
    def run(offloader, checkpoint):
        torch.manual_seed(0)
        weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

        def block(x):
            y = torch.tanh(x @ weight)
            with ebb.no_offload():
                y = torch.sigmoid(y)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                y = torch.tanh(y) * y
            return torch.nn.functional.dropout(torch.sigmoid(y), 0.5)

        found = []
        for _ in range(6):
            weight.grad = None
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            with offloader:
                y = x * 1
                for _ in range(3):
                    y = ebb.checkpoint(block, y, early_stop=early) if checkpoint else block(y)
            y.sum().backward()
            found.append([weight.grad.clone(), x.grad.clone(), torch.rand(2)])
        return found

    plain = run(ebb.Offloader("cpu", enabled=False), checkpoint=False)
    offloader = ebb.Offloader(**OPTIONS)
    assert_same(plain, run(offloader, checkpoint=True))
    assert offloader.stats().recomputed.tensors > 0


def test_bad_regions_are_named():
    model = model_of(None)
    with pytest.raises(ValueError, match="no module 'mlp'"):
        ebb.wrap(model, regions=["mlp"], **OPTIONS)
    with pytest.raises(ValueError, match="needs a budget"):
        ebb.wrap(model, regions=["blocks.0"], device="cpu")
    with pytest.raises(TypeError, match="must be a list"):
        ebb.wrap(model, regions="up", **OPTIONS)
    ebb.wrap(model, regions=["up"], **OPTIONS)
