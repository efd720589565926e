import gc

import pytest
import torch

import ebb
from conftest import assert_same, data, gradients, new_model


def checkpointed(guard, function=None):
    model = new_model()
    with guard:
        hidden = ebb.checkpoint(function or model.body, data().requires_grad_())
        loss = model.head(hidden).square().mean()
    loss.backward()
    return [loss, *gradients(model)]


def plain(guard):
    model = new_model()
    with guard:
        loss = model(data().requires_grad_()).square().mean()
    loss.backward()
    return [loss, *gradients(model)]


def both(ours, theirs, *guards):
    import contextlib

    from conftest import results

    for a, b in zip(results(ours, *guards), results(theirs, contextlib.nullcontext()), strict=True):
        assert torch.equal(a, b)


def test_a_checkpointed_part_with_dropout_is_exact(offloader):
    import contextlib

    both(checkpointed, plain, contextlib.nullcontext())
    both(checkpointed, plain, offloader)
    assert offloader.stats().offloaded.tensors > 0


def test_only_the_inputs_are_saved(offloader):
    runs = []

    def function(x):
        runs.append(x)
        return x.exp().sin().cos()

    leaf = torch.ones(1 << 16, requires_grad=True)
    with offloader:
        y = ebb.checkpoint(function, leaf * 2)
    assert offloader.stats().saved.tensors == 1
    assert len(runs) == 1
    y.sum().backward()
    assert len(runs) == 2


def test_inputs_and_results_may_be_nested(offloader):
    def function(pair, *, scale, names, offset=0.0):
        a, b = pair
        return {"sum": (a + b).sin() * scale["x"], "rest": [names, (a * b).exp() + offset]}

    a = torch.ones(64, requires_grad=True)
    b = torch.full((64,), 0.5, requires_grad=True)
    s = torch.full((64,), 3.0, requires_grad=True)

    def step(guard):
        for each in (a, b, s):
            each.grad = None
        with guard:
            out = call((a, b), scale={"x": s}, names="kept", offset=2.0)
            assert out["rest"][0] == "kept"
            loss = out["sum"].sum() + out["rest"][1].sum()
        loss.backward()
        return [loss, a.grad, b.grad, s.grad]

    call = function
    import contextlib

    from conftest import results

    expected = results(step, contextlib.nullcontext())

    def call(*arguments, **named):
        return ebb.checkpoint(function, *arguments, **named)

    for guard in (contextlib.nullcontext(), offloader):
        assert all(torch.equal(x, y) for x, y in zip(results(step, guard), expected, strict=True))
    assert offloader.stats().saved.tensors == offloader.stats().kept["parameter"].tensors == 3


def test_regions_nest(offloader):
    def inner(x):
        return x.sin().exp()

    def outer(x):
        return ebb.checkpoint(inner, x.cos()).tanh()

    def step(call):
        leaf = torch.linspace(-1, 1, 512, requires_grad=True)
        with offloader:
            y = call(leaf * 1)
        y.sum().backward()
        return leaf.grad

    assert torch.equal(step(lambda x: ebb.checkpoint(outer, x)), step(lambda x: x.cos().sin().exp().tanh()))


class Odd(Exception):
    pass


def test_what_a_function_raises_reaches_the_caller_as_it_is():
    error = Odd()

    def function(x):
        raise error

    with pytest.raises(Odd) as caught:
        ebb.checkpoint(function, torch.ones(3, requires_grad=True))
    assert caught.value is error


def test_what_the_second_run_raises_reaches_backward_as_it_is():
    runs = []

    def function(x):
        runs.append(1)
        if len(runs) == 2:
            raise Odd("again")
        return x.exp()

    loss = ebb.checkpoint(function, torch.ones(3, requires_grad=True) * 1).sum()
    with pytest.raises(Odd, match="again"):
        loss.backward()


def test_a_second_run_that_saves_something_else_is_a_runtime_error():
    runs = []

    def function(x):
        runs.append(1)
        return x.exp() if len(runs) == 1 else x[:2].exp()

    loss = ebb.checkpoint(function, torch.ones(3, requires_grad=True) * 1).sum()
    with pytest.raises(RuntimeError, match="must compute the same"):
        loss.backward()


def test_without_gradients_the_function_just_runs():
    with torch.no_grad():
        y = ebb.checkpoint(lambda x: (x.exp(), None), torch.ones(3, requires_grad=True))
    assert y[1] is None
    assert not y[0].requires_grad


def test_autocast_is_the_first_runs(offloader):
    dtypes = []

    def function(x):
        y = x @ x
        dtypes.append(y.dtype)
        return y.float().sin()

    leaf = torch.ones(8, 8, requires_grad=True)
    with offloader, torch.autocast("cpu", torch.bfloat16):
        y = ebb.checkpoint(function, leaf * 1)
    y.sum().backward()
    assert dtypes == [torch.bfloat16, torch.bfloat16]


def test_a_function_goes_with_its_graph():
    import weakref

    class Function:
        def __call__(self, x):
            return x.exp()

    function = Function()
    gone = weakref.ref(function)
    y = ebb.checkpoint(function, torch.ones(8, requires_grad=True) * 1).sum()
    del function
    assert gone() is not None
    y.backward()
    del y
    gc.collect()
    assert gone() is None


def test_an_interrupt_after_the_first_run_leaves_nothing(offloader, monkeypatch):
    real = ebb._core.checkpoint

    def cut(run, tensors, early_stop):
        real(run, tensors, early_stop)
        raise KeyboardInterrupt

    monkeypatch.setattr(ebb._core, "checkpoint", cut)
    for _ in range(3):
        x = torch.ones(256, requires_grad=True)
        with offloader, pytest.raises(KeyboardInterrupt):
            ebb.checkpoint(lambda given: given.exp().sin(), x.exp())
    gc.collect()
    offloader.drain()
    assert offloader.stats().pool.now_bytes == 0


def block_of(weight, ends):
    def function(x):
        y = x.sin() @ weight
        ends.append(None)
        return y + 1

    return function


@pytest.mark.parametrize("early_stop", [False, True])
def test_a_second_run_ends_where_nothing_more_is_needed_if_it_may(offloader, early_stop):
    ends = []
    weight = torch.randn(8, 8, requires_grad=True)
    function = block_of(weight, ends)
    x = torch.randn(4, 8, requires_grad=True)
    with offloader:
        ebb.checkpoint(function, x, early_stop=early_stop).sum().backward()
    assert len(ends) == (1 if early_stop else 2)
    found = x.grad, weight.grad
    x.grad = weight.grad = None
    function(x).sum().backward()
    assert torch.equal(found[0], x.grad) and torch.equal(found[1], weight.grad)


def test_the_end_of_a_second_run_is_no_exception_that_programs_catch(offloader):
    weight = torch.randn(8, 8, requires_grad=True)
    errors, ends = [], []

    def function(x):
        y = x.sin()
        try:
            return y @ weight
        except Exception as error:
            errors.append(error)
            raise
        except BaseException as end:
            ends.append(type(end))
            return (y @ weight).cos()  # goes on

    x = torch.randn(4, 8, requires_grad=True)
    with offloader:
        y = ebb.checkpoint(function, x, early_stop=True)
    y.sum().backward()
    assert not errors and ends == [ebb.EndOfRegion]
    assert torch.equal(weight.grad, (x.sin().t() @ torch.ones(4, 8)).detach())


def test_an_interrupt_while_a_second_run_ends_arrives():
    weight = torch.randn(8, 8, requires_grad=True)
    runs = []

    def function(x):
        runs.append(None)
        try:
            return x.sin() @ weight
        finally:
            if len(runs) == 2:
                raise KeyboardInterrupt

    y = ebb.checkpoint(function, torch.randn(4, 8, requires_grad=True), early_stop=True)
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()


def test_a_scripted_functions_second_run_ends():
    weight = torch.randn(8, 8, requires_grad=True)

    @torch.jit.script
    def product(x, w):
        return torch.mm(torch.sin(x), w)

    x = torch.randn(4, 8, requires_grad=True)
    with torch.jit.optimized_execution(False):
        ebb.checkpoint(lambda x: product(x, weight), x, early_stop=True).sum().backward()
    assert torch.equal(weight.grad, (x.sin().t() @ torch.ones(4, 8)).detach())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_function_may_be_compiled_in_a_region(backend):
    torch.manual_seed(1)
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    compiled = torch.compile(block, backend=backend)
    x = torch.randn(4, 8)
    ebb.checkpoint(compiled, x.clone().requires_grad_()).sum().backward()
    found = block[0].weight.grad
    block.zero_grad()
    block(x).sum().backward()
    assert torch.equal(found, block[0].weight.grad)


def test_backward_may_run_in_inference_mode():
    weight = torch.randn(8, 8, requires_grad=True)
    y = ebb.checkpoint(lambda x: (x.sin() @ weight).tanh(), torch.randn(4, 8, requires_grad=True)).sum()
    with torch.inference_mode():
        y.backward()
    assert weight.grad is not None
