"""ebb beside everything else that torch does with autograd."""

import contextlib
import gc
import threading

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import ebb
from conftest import assert_same, data, gradients, new_model, run_python


def leaf(elements=256):
    return torch.linspace(-1, 1, elements, requires_grad=True)


def saved(offloader):
    return offloader.stats().saved.tensors


class Counted:
    """Hooks of Python's that count, and keep what they get."""

    def __init__(self):
        self.packed = self.unpacked = 0

    def pack(self, tensor):
        self.packed += 1
        return tensor.detach().clone()

    def unpack(self, tensor):
        self.unpacked += 1
        return tensor

    def hooks(self):
        return saved_tensors_hooks(self.pack, self.unpack)


# Hooks of Python's: the innermost wins.


def test_hooks_inside_of_a_guard_win(offloader):
    counted = Counted()
    with offloader:
        x = leaf().exp()
        with counted.hooks():
            y = x.sin()
        z = y.cos()
    assert (saved(offloader), counted.packed) == (2, 1)
    z.sum().backward()
    assert counted.unpacked == 1


def test_a_guard_inside_of_hooks_wins(offloader):
    counted = Counted()
    with counted.hooks():
        x = leaf().exp()
        with offloader:
            y = x.sin()
        z = y.cos()
    assert (saved(offloader), counted.packed) == (1, 2)
    z.sum().backward()
    assert counted.unpacked == 2


def test_guards_and_hooks_take_turns(offloader):
    outer, inner = Counted(), Counted()
    with offloader, outer.hooks(), offloader, inner.hooks():
        a = leaf().exp()
        with offloader:
            b = leaf().exp()
            with ebb.no_offload():
                c = leaf().exp()
    assert (saved(offloader), outer.packed, inner.packed) == (1, 0, 2)
    (a + b + c).sum().backward()


def test_no_offload_inside_of_hooks_leaves_saves_to_them(offloader):
    counted = Counted()
    with offloader, counted.hooks(), ebb.no_offload():
        loss = leaf().exp().sum()
    assert (saved(offloader), counted.packed) == (0, 1)
    loss.backward()


def test_hooks_inside_of_a_checkpointed_region_win(offloader):
    counted = Counted()

    def function(x):
        with counted.hooks():
            y = x.sin()
        return y.exp()

    def step(guard):
        x = leaf()
        with guard:
            y = ebb.checkpoint(function, x * 1)
        y.sum().backward()
        return [x.grad]

    assert_same(step, offloader)
    assert counted.packed >= 2


def test_a_checkpointed_region_inside_of_hooks_wins(offloader):
    counted = Counted()
    x = leaf()
    with counted.hooks():
        y = ebb.checkpoint(lambda t: t.sin().exp().cos(), x)
    assert counted.packed == 1  # its input
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().cos().sum(), x)[0])


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_save_on_cpu_is_exact(offloader, order):
    def step(guard):
        model = new_model()
        first, second = (guard, save_on_cpu()) if order == "inside" else (save_on_cpu(), guard)
        with first, second:
            hidden = model.body(data())
        with guard:
            loss = model.head(hidden).square().mean()
        loss.backward()
        return [loss, *gradients(model)]

    assert_same(step, offloader)


def test_where_hooks_are_forbidden_saves_stay(offloader):
    x = leaf()
    with offloader, torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        loss = x.exp().sum()
    assert saved(offloader) == 0
    loss.backward()
    assert torch.equal(x.grad, x.exp())


# Checkpointing of torch's.


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward", ["inside", "outside"])
def test_torchs_checkpoint_is_exact(offloader, reentrant, backward):
    def step(guard):
        model = new_model()
        x = data().requires_grad_()
        with guard:
            hidden = torch_checkpoint(model.body, x.sin(), use_reentrant=reentrant)
            loss = model.head(hidden).square().mean()
            if backward == "inside":
                loss.backward()
        if backward == "outside":
            loss.backward()
        return [loss, x.grad, *gradients(model)]

    assert_same(step, offloader)


def test_torchs_checkpoint_saves_what_it_says_inside_of_a_guard(offloader):
    runs = []

    def function(x):
        runs.append(1)
        return x.exp().sin().cos()

    with offloader:
        y = torch_checkpoint(function, leaf() * 1, use_reentrant=False)
    assert saved(offloader) <= 2  # its input, and none of what is computed again
    y.sum().backward()
    assert len(runs) == 2


def test_a_guard_inside_of_torchs_checkpoint_is_exact(offloader):
    def step(guard):
        model = new_model()

        def guarded(x):
            with guard:
                return model.body(x)

        x = data().requires_grad_()
        loss = model.head(torch_checkpoint(guarded, x, use_reentrant=True)).square().mean()
        loss.backward()
        return [loss, x.grad, *gradients(model)]

    assert_same(step, offloader)


def test_selective_checkpointing_is_exact(offloader):
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context, operation, *arguments, **named):
        matmul = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if matmul else CheckpointPolicy.PREFER_RECOMPUTE

    def step(guard):
        model = new_model().eval()
        x = data().requires_grad_()
        with guard:
            contexts = partial(create_selective_checkpoint_contexts, policy)
            hidden = torch_checkpoint(model.body, x * 1, use_reentrant=False, context_fn=contexts)
            loss = model.head(hidden).square().mean()
        loss.backward()
        return [loss, x.grad, *gradients(model)]

    assert_same(step, offloader)


# Functions of Python's.


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, keep):
        y = x * x
        ctx.save_for_backward(x, y)
        ctx.kept = keep
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        assert torch.equal(x, again)
        return 3 * y * gradient, None


def test_a_custom_function_is_exact(offloader):
    def step(guard):
        x = leaf()
        with guard:
            loss = Cube.apply(x.sin(), "anything").sum()
        loss.backward()
        return [loss, x.grad]

    assert_same(step, offloader)


def test_a_custom_function_with_setup_context_is_exact(offloader):
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.exp()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0]

    def step(guard):
        x = leaf()
        with guard:
            loss = Exp.apply(x * 2).sum()
        loss.backward()
        return [loss, x.grad]

    assert_same(step, offloader)


def test_a_custom_functions_own_backward_is_exact(offloader):
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                again = x.detach().requires_grad_()
                return torch.autograd.grad(again.sin().exp().log().sum(), again)[0] * gradient

    def step(guard):
        x = leaf()
        with guard:
            loss = Inner.apply(x * 1).sum()
            loss.backward()
        return [x.grad]

    assert_same(step, offloader)


# Derivatives.


def test_double_backward_is_exact(offloader):
    def step(guard):
        model = new_model().eval()
        x = data().requires_grad_()
        with guard:
            y = model(x).tanh().sum()
            (gradient,) = torch.autograd.grad(y, x, create_graph=True)
            penalty = gradient.square().sum()
        penalty.backward()
        return [penalty, x.grad, *gradients(model)]

    assert_same(step, offloader)


def test_a_retained_graph_is_exact_each_time(offloader):
    def step(guard):
        model = new_model()
        with guard:
            loss = model(data()).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return [loss, *gradients(model)]

    assert_same(step, offloader)


def test_gradient_accumulation_is_exact(offloader):
    def step(guard):
        model = new_model()
        losses = []
        for rows in (8, 16, 8):
            with guard:
                losses.append(model(data(rows)).square().mean())
        for loss in losses:
            loss.backward()
        return [*losses, *gradients(model)]

    assert_same(step, offloader)


def test_grad_of_some_inputs_is_exact(offloader):
    def step(guard):
        a, b = leaf(), leaf()
        with guard:
            y = (a.exp() * b.sin()).sum()
        first = torch.autograd.grad(y, a, retain_graph=True)
        second = torch.autograd.grad(y, [a, b])
        return [*first, *second]

    assert_same(step, offloader)


def test_hessians_and_jacobians_are_exact(offloader):
    def function(x):
        return (x.exp() * x.sin()).sum()

    def step(guard):
        x = torch.linspace(-1, 1, 8)
        with guard:
            return [
                torch.autograd.functional.hessian(function, x),
                torch.autograd.functional.jacobian(torch.sin, x, create_graph=True),
            ]

    assert_same(step, offloader)


@pytest.mark.parametrize("name", ["grad", "vmap of grad", "vjp", "jvp", "jacrev", "hessian"])
def test_transforms_of_functions_are_exact(offloader, name):
    def function(x):
        return (x.exp() * x.sin()).sum()

    def compute(x):
        match name:
            case "grad":
                return torch.func.grad(function)(x)
            case "vmap of grad":
                return torch.func.vmap(torch.func.grad(function))(x.reshape(4, -1))
            case "vjp":
                output, back = torch.func.vjp(torch.sin, x)
                return back(output)[0]
            case "jvp":
                return torch.func.jvp(torch.sin, (x,), (x,))[1]
            case "jacrev":
                return torch.func.jacrev(torch.sin)(x)
            case "hessian":
                return torch.func.hessian(function)(x)

    def step(guard):
        x = torch.linspace(-1, 1, 16)
        with guard:
            result = compute(x)
            outer = leaf()
            loss = (outer.exp() * outer).sum()  # beside it, plain saves move
        loss.backward()
        return [result, outer.grad]

    assert_same(step, offloader)


def test_a_transform_over_parameters_is_exact_with_backward_around_it(offloader):
    def step(guard):
        x = leaf(16)
        with guard:
            y = torch.func.vmap(lambda row: (row.sin() * row.exp()).sum())(x.reshape(4, 4) * 1).sum()
        y.backward()
        return [y, x.grad]

    assert_same(step, offloader)


def test_forward_mode_is_exact(offloader):
    import torch.autograd.forward_ad as forward_ad

    def step(guard):
        x = leaf()
        with guard, forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            y = dual.exp().sin()
            tangent = forward_ad.unpack_dual(y).tangent
            loss = forward_ad.unpack_dual(y).primal.sum()
            loss.backward()
        return [tangent, x.grad]

    assert_same(step, offloader)


# Modes.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_exact(offloader, dtype):
    def step(guard):
        model = new_model()
        with guard, torch.autocast("cpu", dtype):
            loss = model(data()).float().square().mean()
        loss.backward()
        return [loss, *gradients(model)]

    assert_same(step, offloader)


def test_anomaly_mode_is_exact_and_names_the_culprit(offloader):
    def step(guard):
        model = new_model()
        with guard, torch.autograd.detect_anomaly(check_nan=True):
            loss = model(data()).square().mean()
            loss.backward()
        return [loss, *gradients(model)]

    with pytest.warns(UserWarning, match="Anomaly"):
        assert_same(step, offloader)
    with pytest.warns(UserWarning, match="Anomaly"), pytest.raises(RuntimeError, match="SqrtBackward0"):
        with offloader, torch.autograd.detect_anomaly():
            (leaf() * 0).sqrt().mul(0).sum().backward()


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "node_creation_hook"), reason="a newer torch has it")
def test_node_creation_hooks_see_the_nodes_that_they_see_without_ebb(offloader):
    def nodes(guard):
        seen = []
        with guard, torch.autograd.graph.node_creation_hook(lambda node: seen.append(node.name())):
            loss = new_model()(data()).square().mean()
        loss.backward()
        return seen

    plain = nodes(contextlib.nullcontext())
    assert len(plain) > 5
    assert nodes(offloader) == plain


def test_the_profiler_sees_every_operation_and_steps_are_exact(offloader):
    def step(guard):
        model = new_model()
        with torch.profiler.profile() as profile:
            with guard:
                loss = model(data()).square().mean()
            loss.backward()
        assert {"aten::addmm", "aten::gelu"} <= {event.key for event in profile.key_averages()}
        return [loss, *gradients(model)]

    assert_same(step, offloader)


def test_deterministic_algorithms_are_no_hindrance(offloader):
    def step(guard):
        model = new_model()
        torch.use_deterministic_algorithms(True)
        try:
            with guard:
                loss = model(data()).square().mean()
            loss.backward()
        finally:
            torch.use_deterministic_algorithms(False)
        return [loss, *gradients(model)]

    assert_same(step, offloader)


def test_inference_mode_and_no_grad_save_nothing(offloader):
    model = new_model()
    with offloader, torch.inference_mode():
        model(data())
    with offloader, torch.no_grad():
        model(data())
    assert saved(offloader) == 0


# Hooks on tensors, nodes and modules.


def test_backward_hooks_are_called_and_steps_are_exact(offloader):
    def step(guard):
        model = new_model()
        seen = []
        model.body.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
        model.head.register_full_backward_pre_hook(lambda module, outputs: seen.append(outputs[0]))
        model.head.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
        with guard:
            hidden = model.body(data().requires_grad_())
            hidden.register_hook(lambda gradient: gradient * 2)
            loss = model.head(hidden).square().mean()
            loss.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0]))
        loss.backward()
        assert len(seen) == 4
        return [loss, *seen, *gradients(model)]

    assert_same(step, offloader)


def test_an_optimizer_inside_of_backward_is_exact(offloader):
    def step(guard):
        model = new_model()
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def update(weight, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            with guard:
                loss = model(data()).square().mean()
            loss.backward()
        return [loss, *model.parameters()]

    assert_same(step, offloader)


def test_a_hook_that_raises_reaches_the_caller_and_leaves_nothing_behind(offloader):
    class Stop(Exception):
        pass

    def stop(gradient):
        raise Stop

    with offloader:
        x = leaf().exp()
        x.register_hook(stop)
        loss = x.sin().sum()
    with pytest.raises(Stop):
        loss.backward()
    del loss, x
    gc.collect()
    assert offloader.stats().pool.now_bytes == 0


# Threads and processes.


def test_backward_on_another_thread_is_exact(offloader):
    def step(guard):
        model = new_model()
        with guard:
            loss = model(data()).square().mean()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return [loss, *gradients(model)]

    assert_same(step, offloader)


def test_two_threads_that_go_backward_over_one_graph_are_exact(offloader):
    x = leaf()
    with offloader:
        y = (x.exp() * x.sin()).sum()
    results = []

    def derive():
        results.append(torch.autograd.grad(y, x, retain_graph=True)[0])

    threads = [threading.Thread(target=derive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = torch.autograd.grad((x.exp() * x.sin()).sum(), x)[0]
    assert len(results) == 4
    assert all(torch.equal(each, expected) for each in results)
    del y


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((16,), float(index)) / 32


def test_workers_of_a_data_loader_that_fork_later_are_no_hindrance(offloader):
    def step(guard):
        model = new_model()
        losses = []
        for batch in torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=2):
            with guard:
                loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss)
        return [*losses, *gradients(model)]

    assert_same(step, offloader)


def test_workers_that_start_inside_of_a_guard_are_no_hindrance(offloader):
    with offloader:
        batches = list(torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=2))
    assert len(batches) == 4


def test_a_forked_child_gets_an_error_and_may_make_an_offloader_of_its_own():
    printed = run_python(
        """
        import os, sys, torch, ebb
        torch.set_num_threads(1)
        offloader = ebb.Offloader("cpu", ebb.policies.offload_everything())
        with offloader:
            y = torch.ones(100, requires_grad=True).exp().sum()
        child = os.fork()
        if child == 0:
            try:
                offloader.stats()
            except RuntimeError as error:
                print("refused:", "fork" in str(error))
            own = ebb.Offloader("cpu", ebb.policies.offload_everything())
            x = torch.ones(100, requires_grad=True)
            with own:
                x.exp().sum().backward()
            print("moved", own.stats().offloaded.tensors, torch.equal(x.grad, torch.ones(100).exp()))
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        y.backward()
        print("parent", offloader.stats().pool.now_bytes)
        """
    )
    assert printed.splitlines() == ["refused: True", "moved 1 True", "parent 0"]


@pytest.mark.parametrize("kept", ["graph", "guard", "offloader", "policy"])
def test_an_interpreter_ends_with_whatever_is_still_alive(kept):
    program = {
        "graph": "with offloader: y = x.exp().sum()",
        "guard": "offloader.__enter__(); y = x.exp().sum()",
        "offloader": "with offloader: x.exp().sum().backward()\nx.keep = offloader; x.me = x",
        "policy": """
offloader = ebb.Offloader("cpu", lambda candidate: bool(offloader))
with offloader: y = ebb.checkpoint(lambda t: t.exp(), x).sum()""",
    }[kept]
    head = """
import torch, ebb
torch.set_num_threads(1)
offloader = ebb.Offloader("cpu", ebb.policies.offload_everything())
x = torch.ones(100, requires_grad=True)
"""
    assert run_python(head + program + "\nprint('done')").splitlines()[-1] == "done"


# Compiled steps.


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_steps_are_exact_and_hold_nothing(offloader, backend):
    torch._dynamo.reset()
    model = new_model().eval()

    def forward(x):
        return model(x).square().mean()

    compiled = torch.compile(forward, backend=backend)

    def step(guard):
        model.zero_grad()
        with guard:
            loss = compiled(data())
        loss.backward()
        return [loss, *gradients(model)]

    assert_same(step, offloader)
    model.zero_grad()
    gc.collect()
    stats = offloader.stats()
    assert stats.saved_on_device.now_bytes == 0
    assert stats.pool.now_bytes == 0
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_step_may_change_its_batch_size(offloader, dynamic):
    torch._dynamo.reset()
    model = new_model().eval()
    compiled = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    plain = new_model().eval()
    for rows in (24, 24, 9, 17):
        for each in (model, plain):
            each.zero_grad()
        with offloader:
            loss = compiled(data(rows)).square().mean()
        loss.backward()
        plain(data(rows)).square().mean().backward()
        for a, b in zip(gradients(model), gradients(plain), strict=True):
            assert torch.equal(a, b)


def test_nested_tensors_are_left_alone(offloader):
    def step(guard):
        parts = [torch.ones(2, 3), torch.full((4, 3), 2.0)]
        nested = torch.nested.nested_tensor(parts, requires_grad=True)
        with guard:
            x = nested.clone()
            y = x * x
        torch.nested.to_padded_tensor(y, 0.0).sum().backward()
        return [torch.nested.to_padded_tensor(nested.grad, 0.0)]

    assert_same(step, offloader, moves=False)
