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

    def cut(run, tensors):
        real(run, tensors)
        raise KeyboardInterrupt

    monkeypatch.setattr(ebb._core, "checkpoint", cut)
    for _ in range(3):
        x = torch.ones(256, requires_grad=True)
        with offloader, pytest.raises(KeyboardInterrupt):
            ebb.checkpoint(lambda given: given.exp().sin(), x.exp())
    gc.collect()
    offloader.drain()
    assert offloader.stats().pool.now_bytes == 0


def test_a_second_run_ends_where_nothing_more_is_needed(offloader):
    ends, errors = [], []
    weight = torch.randn(8, 8, requires_grad=True)

    def function(x):
        try:
            y = x.sin() @ weight
        except Exception as error:  # a program's own handling, which takes the end of a run for no error
            errors.append(error)
            raise
        ends.append(None)
        return y + 1

    x = torch.randn(4, 8, requires_grad=True)
    with offloader:
        ebb.checkpoint(function, x).sum().backward()
    assert len(ends) == 1 and not errors
    found = x.grad, weight.grad
    x.grad = weight.grad = None
    function(x).sum().backward()
    assert torch.equal(found[0], x.grad) and torch.equal(found[1], weight.grad)


def test_a_function_may_catch_what_ends_its_second_run_and_go_on(offloader):
    weight = torch.randn(8, 8, requires_grad=True)
    caught = []

    def function(x):
        y = x.sin()
        try:
            return y @ weight
        except BaseException as error:
            caught.append(type(error))
            return (y @ weight).cos()

    x = torch.randn(4, 8, requires_grad=True)
    with offloader:
        y = ebb.checkpoint(function, x)
    y.sum().backward()
    assert caught == [GeneratorExit]
    assert torch.equal(weight.grad, (x.sin().t() @ torch.ones(4, 8)).detach())
