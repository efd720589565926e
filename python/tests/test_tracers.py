"""What knows tensors by identity, or sees operations that are not the program's: tracers, dispatch modes, Functions."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import ebb
from conftest import assert_same


def test_make_fx_traces_what_was_saved(offloader):
    def f(x):
        y = (x.sin() * x.cos()).exp()
        return torch.autograd.grad(y.sum(), x)[0]

    with offloader:
        graph = make_fx(f)(torch.ones(3, requires_grad=True))
    x = torch.arange(3.0).requires_grad_()
    assert torch.equal(graph(x), f(x))


class Seen(TorchDispatchMode):
    """Notes the operations, and takes a detach for nothing."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        self.operations.append(operation)
        if operation is torch.ops.aten.detach.default:
            return arguments[0]
        return operation(*arguments, **(named or {}))


@pytest.mark.parametrize(
    "options",
    [{"policy": ebb.policies.offload_everything()}, {"policy": ebb.policies.recompute()}, {"least_memory": True}],
    ids=str,
)
def test_a_dispatch_mode_sees_the_programs_operations_alone(options):
    def program(guard):
        w = torch.linspace(-1, 1, 32, requires_grad=True)
        mask = torch.ones(32)
        with Seen() as seen:
            with guard:
                x = w * mask
                y = (x * 2).sin() * x
            loss = y.sum()
        loss.backward()
        return seen.operations, [loss.detach(), w.grad]

    operations, expected = program(torch.enable_grad())
    found, values = program(ebb.Offloader("cpu", planned_minimum_bytes=1, **options))
    assert found == operations
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


class Rounds(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        result = operation(*arguments, **(named or {}))
        return result.round(decimals=2) if operation is torch.ops.aten.silu.default else result


@pytest.mark.parametrize("options", [{"policy": ebb.policies.recompute()}, {"least_memory": True}], ids=str)
def test_what_a_dispatch_mode_has_changed_is_not_computed_without_the_mode(options):
    def step(guard):
        torch.manual_seed(0)
        w = torch.randn(16, 16, requires_grad=True)
        with guard:
            x = w.exp()
            with Rounds():
                y = torch.nn.functional.silu(x)
            z = y.square().sum()
        del x, y
        z.backward()
        return w.grad

    expected = step(contextlib.nullcontext())
    offloader = ebb.Offloader("cpu", planned_minimum_bytes=1, **options)
    for _ in range(4):
        assert torch.equal(step(offloader), expected)


def test_flops_are_counted_beside_recipes():
    offloader = ebb.Offloader("cpu", ebb.policies.recompute())

    def step(guard):
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        with FlopCounterMode(display=False), guard:
            y = ((x @ x) * 2).sin().sum()
        y.backward()
        return [x.grad]

    assert_same(step, offloader)


@pytest.mark.parametrize("make_sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr], ids=["coo", "csr"])
def test_values_of_a_sparse_tensor_have_no_recipe(make_sparse):
    offloader = ebb.Offloader("cpu", ebb.policies.recompute())

    def step(guard):
        x = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        with guard:
            y = make_sparse(x.sin()).values().pow(2).sum()
        y.backward()
        return [x.grad]

    assert_same(step, offloader)


def test_a_function_that_saves_the_view_it_returns_is_freed(offloader):
    class Mark:
        pass

    class View(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            with torch.enable_grad():
                torch.ones(3, requires_grad=True).sin().cos()  # nodes that are newer than this Function's
            y = x.view(-1)
            context.save_for_backward(y)
            context.mark = Mark()
            marks.append(weakref.ref(context.mark))
            return y

        @staticmethod
        def backward(context, gradient):
            (y,) = context.saved_tensors
            return (gradient * y).view(8, 8)

    marks = []
    x = torch.randn(8, 8, requires_grad=True)
    with offloader:
        z = View.apply(x).pow(2).sum()
    del x, z
    gc.collect()
    assert marks[0]() is None


def test_inputs_of_a_region_that_are_one_tensor_are_one_again(offloader):
    attention = torch.nn.MultiheadAttention(8, 2)

    def step(guard):
        attention.zero_grad()
        x = torch.linspace(-1, 1, 80).view(5, 2, 8).requires_grad_()
        hidden = x * 1
        with guard:
            if guard is offloader:
                out = ebb.checkpoint(attention, hidden, hidden, hidden)[0]
            else:
                out = attention(hidden, hidden, hidden)[0]
        out.sum().backward()
        return [x.grad, *(weight.grad for weight in attention.parameters())]

    assert_same(step, offloader)

    def scaled(a, b):
        return (a * b).exp() if a is b else a.sin() * b

    x = torch.linspace(-1, 1, 8, requires_grad=True)
    hidden = x * 1
    ebb.checkpoint(scaled, hidden, hidden).sum().backward()
    found, x.grad = x.grad, None
    hidden = x * 1
    scaled(hidden, hidden).sum().backward()
    assert torch.equal(found, x.grad)
