"""Modules that a plan may run again as a whole: compiled blocks, and those that the program names."""

import copy
import gc
import pickle
import weakref

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
            found.append([x.grad, torch.rand(2), *([] if weight.grad is None else [weight.grad.clone()])])
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


def regions_of(*functions):
    """Six steps over regions of each function, plain and under a plan, by ebb.checkpoint and by ebb.recomputable."""

    def run(offloader, call):
        torch.manual_seed(0)
        weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
        found = []
        for _ in range(6):
            weight.grad = None
            x = torch.randn(ROWS, WIDTH, requires_grad=True)
            with offloader:
                y = x * 1
                for function in functions:
                    y = call(function, y, weight) + 0
            y.sum().backward()
            found.append([x.grad, torch.rand(2), *([] if weight.grad is None else [weight.grad.clone()])])
        return found

    plain = run(ebb.Offloader("cpu", enabled=False), lambda function, *inputs: function(*inputs))
    for call in (ebb.checkpoint, ebb.recomputable):
        for capacity in (4096, None):
            offloader = ebb.Offloader(**OPTIONS | {"capacity_bytes": capacity})
            assert_same(plain, run(offloader, call))
            assert capacity is None or offloader.stats().recomputed.tensors > 0


def test_what_a_second_run_saves_twice_or_keeps_stays_whole():
    kept = {}

    def twice(x, w):
        y = torch.tanh(x @ w)
        return torch.sin(y) * y.data  # two saves over one memory, with two version counters

    def keeps(x, w):
        kept["attention"] = torch.softmax(x @ w, -1)
        return torch.sigmoid(torch.sin(kept["attention"]))

    def inputs(x, w):
        return torch.sigmoid(torch.sin(x) * x.data) * x.data.view(-1).view_as(x)

    regions_of(twice, twice)
    regions_of(keeps, keeps)
    attention = kept["attention"]
    other = torch.full((ROWS, WIDTH), 7.0)  # would take the memory, were it free
    assert torch.allclose(attention.sum(-1), torch.ones(ROWS)) and other[0, 0] == 7
    regions_of(inputs, inputs, inputs)


def test_inference_tensors_may_be_inputs_and_buffers():
    with torch.inference_mode():
        bias = torch.ones(WIDTH)
    regions_of(lambda x, w: torch.tanh(ebb.checkpoint(lambda y, b: torch.sigmoid(y + b), x, bias)))
    expected = model_of()
    model = model_of()
    for each in (expected, model):
        for block in each.blocks:
            block.register_buffer("bias", bias)
    ebb.wrap(model, **OPTIONS)
    assert_same(steps(expected, 3), steps(model, 3))


def test_the_first_run_has_the_callers_own_lists():
    class Lists(Block):
        def forward(self, x, seen):
            seen.append(super().forward(x))
            return seen[-1]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(Lists() for _ in range(3))
            self.lm_head = torch.nn.Linear(WIDTH, 8)

        def forward(self, x):
            seen = []
            for block in self.blocks:
                x = block(x, seen)
            return self.lm_head(torch.stack(seen).sum(0)).square().mean()

    def made():
        torch.manual_seed(0)
        model = Model()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model

    model = made()
    ebb.wrap(model, **OPTIONS)
    assert_same(steps(made()), steps(model))
    seen = []
    ebb.checkpoint(lambda x, into: into.append(x) or x * 2, torch.ones(2, requires_grad=True), seen)
    assert len(seen) == 1


def compare_wrapped(make, step, count=8):
    def run(model):
        torch.manual_seed(1)
        return [[torch.as_tensor(0 if each is None else each).detach().clone() for each in step(model, i)] for i in range(count)]

    expected = run(make())
    model = make()
    ebb.wrap(model, **OPTIONS)
    assert_same(expected, run(model))


def loss_of(model):
    return model(torch.randn(ROWS, WIDTH))


def test_parameters_may_be_replaced_for_each_call():
    def step(model, i):
        if i == 0:
            model.own = {name: each.detach().clone() for name, each in model.named_parameters()}
        for each in model.own.values():
            each.requires_grad_()
        loss = torch.func.functional_call(model, model.own, torch.randn(ROWS, WIDTH))
        loss.backward()
        gradients = [each.grad for each in model.own.values()]
        model.own = {name: each.detach() - 0.1 * each.grad for name, each in model.own.items()}
        return [loss, *gradients]

    compare_wrapped(model_of, step)


@pytest.mark.parametrize("what", ["frozen", "evaluated", "norm"])
def test_a_model_may_be_frozen_or_evaluated_between_forward_and_backward(what):
    def step(model, i):
        model.requires_grad_(True)
        model.train(what != "norm" or i >= 4)
        model.zero_grad()
        loss = loss_of(model)
        if i >= 4 and what == "frozen":
            model.requires_grad_(False)
        if i >= 4 and what == "evaluated":
            model.eval()
        loss.backward()
        return [loss, *(each.grad for each in model.parameters())]

    compare_wrapped(lambda: model_of(norm=what == "norm"), step)


class Stateful(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)  # another tensor each time
        self.calls += 1
        return super().forward(x) - self.mean


def test_blocks_that_change_themselves_are_run_once():
    def make():
        torch.manual_seed(0)
        model = Model()
        model.blocks = torch.nn.ModuleList(Stateful() for _ in range(3))
        for block in model.blocks:
            block.compile(backend="eager")
        return model

    def step(model, i):
        model.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return [loss, *model.buffers(), *(block.calls for block in model.blocks)]

    compare_wrapped(make, step)


def test_a_compiled_block_is_compiled_as_often_as_without_regions():
    def graphs(without=False, **options):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = model_of()
        if not without:
            ebb.wrap(model, **options, **OPTIONS)
        steps(model)
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    assert graphs() == graphs(regions=[]) == graphs(regions=[], without=True)


def test_a_block_that_keeps_what_it_has_computed_can_be_freed():
    class Keeps(Block):
        def forward(self, x):
            self.kept = torch.sigmoid(super().forward(x))
            return torch.sin(self.kept)

    def freed():
        torch._dynamo.reset()
        model = Model()
        model.blocks = torch.nn.ModuleList(Keeps() for _ in range(3))
        for block in model.blocks:
            block.compile(backend="aot_eager")
        ebb.wrap(model, **OPTIONS)
        for _ in range(3):
            loss_of(model).backward()
        loss_of(model)
        return weakref.ref(model.blocks[0])

    gone = [freed() for _ in range(2)]
    torch._dynamo.reset()
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_no_slowdown_is_a_budget_too():
    model = model_of(None)
    ebb.wrap(model, regions=["blocks.0"], device="cpu", slowdown=0.0)


@pytest.mark.parametrize("fills", [True, False])
def test_a_second_run_may_lay_out_otherwise_what_it_saves(fills):
    runs = 0

    def f(x, w):
        nonlocal runs
        runs += 1
        square = torch.tanh(x.narrow(0, 0, WIDTH) @ w)
        if fills:
            return torch.exp(square if runs % 2 else square.t().contiguous().t())  # exp saves what it returns
        ring = torch.zeros(2, WIDTH, WIDTH)
        ring[runs % 2] = square.detach()
        return torch.tanh(square) * ring[runs % 2]

    torch.manual_seed(0)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    offloader = ebb.Offloader(**OPTIONS)
    for _ in range(5):
        x = torch.randn(ROWS, WIDTH)
        weight.grad = None
        f(x, weight).sum().backward()
        expected, weight.grad = weight.grad, None
        try:
            with offloader:
                y = ebb.checkpoint(f, x, weight) * 1
            y.sum().backward()
            assert torch.equal(expected, weight.grad)
        except RuntimeError as error:
            assert not fills and "lies otherwise" in str(error)
    assert offloader.stats().recomputed.tensors > 0 or not fills
