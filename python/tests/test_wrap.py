import contextlib
import copy
import gc
import pickle
import threading
import warnings
import weakref

import pytest
import torch

import ebb
from conftest import Model, data, gradients, new_model, run_python

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


class Lit(Model):
    """Trained as Lightning trains: by a method other than forward."""

    def training_step(self, x):
        return self(x).square().mean() if self.calls_forward else self.head(self.body(x)).square().mean()

    calls_forward = False


def warnings_of(train):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    return [str(each.message) for each in caught if "ebb" in str(each.message)]


def test_a_model_that_the_loop_trains_without_a_call_of_it_is_warned_of_once():
    model, other = Lit(), new_model()

    def train():
        offloader = ebb.wrap(model, **EVERYTHING)
        for _ in range(8):  # another model's steps are none of this one's
            other(data()).sum().backward()
        for _ in range(2):
            with torch.no_grad():  # Lightning's validation before the first step
                model(data())
            for _ in range(16):
                model.training_step(data()).backward()
        assert offloader.stats().saved.tensors == 0

    (said,) = warnings_of(train)
    assert "Lit" in said and "training_step" in said and "with offloader:" in said


def guarded_by_hand(model):
    offloader = ebb.wrap(model, **EVERYTHING)
    for _ in range(8):
        with offloader:
            loss = model.training_step(data())
        loss.backward()


def a_part_is_wrapped(model):
    ebb.wrap(model.body, keep=[], **EVERYTHING)
    for _ in range(8):
        model.training_step(data()).backward()


def forward_is_called(model):
    model.calls_forward = True
    ebb.wrap(model, **EVERYTHING)
    for _ in range(8):
        model.training_step(data()).backward()


def not_enabled(model):
    ebb.wrap(model, enabled=False, **EVERYTHING)
    for _ in range(8):
        model.training_step(data()).backward()


def unwrapped(model):
    offloader = ebb.wrap(model, **EVERYTHING)
    ebb.unwrap(model)
    for _ in range(8):
        model.training_step(data()).backward()
    assert offloader.stats().saved.tensors == 0


def never_trained(model):
    ebb.wrap(model, **EVERYTHING)
    for _ in range(8):
        new_model()(data()).sum().backward()


@pytest.mark.parametrize(
    "train", [guarded_by_hand, a_part_is_wrapped, forward_is_called, not_enabled, unwrapped, never_trained]
)
def test_nobody_else_is_warned(train):
    assert warnings_of(lambda: train(Lit())) == []


def test_a_child_process_has_none_of_its_parents_warnings():
    run_python(
        """
        import os, warnings, torch, ebb
        warnings.simplefilter("error")
        model = torch.nn.Linear(4, 4)
        offloader = ebb.wrap(model, keep=[], device="cpu")
        child = os.fork()
        if child == 0:
            for _ in range(8):
                torch.nn.functional.linear(torch.ones(2, 4), model.weight).sum().backward()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )


def test_a_model_is_wrapped_once_at_a_time():
    model = new_model()
    ebb.wrap(model, **EVERYTHING)
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(ValueError, match="wrapped already"):
            ebb.wrap(each, **EVERYTHING)
    ebb.wrap(model.body, keep=[], **EVERYTHING)
    again = ebb.wrap(ebb.unwrap(model), **EVERYTHING)
    model(data()).sum().backward()
    assert again.stats().offloaded.tensors > 0


def test_wraps_leave_nothing_behind():
    from ebb._backward import _watches

    gc.collect()
    before = len(_watches)
    for _ in range(3):
        ebb.unwrap(model := new_model())
        ebb.wrap(model, **EVERYTHING)
        ebb.unwrap(model)
    assert len(_watches) == before
    del model
    offloader = weakref.ref(ebb.wrap(new_model(), **EVERYTHING))
    gc.collect()
    assert offloader() is None
    assert len(_watches) == before


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_model_whose_weights_are_made_by_its_first_forward_is_exact():
    model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.Tanh(), torch.nn.LazyLinear(4))
    offloader = ebb.wrap(model, keep=[], **EVERYTHING)
    model(data()).sum().backward()
    plain = ebb.unwrap(copy.deepcopy(model))
    plain.zero_grad()
    plain(data()).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))
    assert offloader.stats().offloaded.tensors > 0


class Teacher(torch.nn.Module):
    """Calls another model, or itself, in the middle of its forward."""

    def __init__(self):
        super().__init__()
        self.first = new_model().body
        self.inner = WithLoss()

    def forward(self, x, teacher=None):
        hidden = self.first(x).tanh().exp()
        if teacher is not None:
            with torch.no_grad():
                hidden = hidden + teacher(x)
        return self.inner.lm_head(self.inner.inner.body(hidden[:, :16].tanh())[:, :4]).exp().sum()


def copied(model):
    return copy.deepcopy(model)


def twice(model):
    return lambda x: model(x, copy.deepcopy(model))


@pytest.mark.parametrize("keep", [None, [], ["lm_head"]])
@pytest.mark.parametrize("teacher_of", [lambda model: model, copied, twice])
def test_a_forward_inside_of_a_forward_leaves_the_guards_as_they_are(keep, teacher_of):
    def saved(teacher_of):
        model = Teacher().eval()
        offloader = ebb.wrap(model, keep=keep, **EVERYTHING)
        model(data(), teacher_of(model)).backward()
        assert unguarded(offloader)
        return offloader.stats().saved.tensors

    assert saved(teacher_of) == saved(lambda model: Teacher().eval()) > 0


def test_a_forward_inside_of_a_compiled_forward_leaves_the_guards_as_they_are():
    def saved(teacher_of):
        torch._dynamo.reset()
        model = Teacher().eval()
        offloader = ebb.wrap(model, **EVERYTHING)
        torch.compile(model, backend="eager")(data(), teacher_of(model)).backward()
        assert unguarded(offloader)
        return offloader.stats().saved.tensors

    assert saved(copied) == saved(lambda model: Teacher().eval()) > 0
    torch._dynamo.reset()


class Calls(Model):
    def forward(self, x, calls=(), cut_off=False):
        x = self.body(x)
        if cut_off:
            raise KeyboardInterrupt
        for call in calls:
            with torch.no_grad(), contextlib.suppress(KeyboardInterrupt):
                call(self)
        return self.head(x.exp())


def test_a_forward_that_is_interrupted_inside_of_another_ends():
    def whole(model):
        model(data())

    def cut_off(model):
        model(data(), cut_off=True)

    def saved(*calls):
        model = Calls().eval()
        offloader = ebb.wrap(model, **EVERYTHING)
        model(data(), calls).sum().backward()
        assert unguarded(offloader)
        return offloader.stats().saved.tensors

    expected = saved()
    assert saved(cut_off) == saved(cut_off, whole) == saved(whole, cut_off, cut_off) == expected
    assert saved(lambda model: model(data(), [cut_off, whole]), whole, cut_off) == expected


def test_forwards_that_were_interrupted_end_with_the_next():
    model = Calls().eval()
    offloader = ebb.wrap(model, **EVERYTHING)

    def deeper(depth):
        if depth:
            deeper(depth - 1)
        else:
            model(data(), cut_off=True)

    for depth in (5, 0, 3):
        with pytest.raises(KeyboardInterrupt):
            deeper(depth)
    assert not unguarded(offloader)
    model(data())
    assert unguarded(offloader)


class Around(torch.nn.Module):
    """What trainers put around a model: another module, which need not call it by its __call__."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module.forward(x)


def test_parts_to_keep_are_found_by_the_end_of_their_names():
    def saved(model, keep):
        offloader = ebb.wrap(model.eval(), keep=keep, **EVERYTHING)
        model(data()).sum().backward()
        assert unguarded(offloader)
        return offloader.stats().saved.tensors

    model = WithLoss()
    expected = saved(WithLoss(), ["lm_head"])
    assert expected < saved(WithLoss(), [])
    for around in (Around(model), Around(Around(model))):
        for keep in (["lm_head"], ["module.lm_head"], None):
            assert saved(copy.deepcopy(around), keep) == expected
    assert saved(torch.compile(WithLoss(), backend="eager"), ["lm_head"]) <= expected
    torch._dynamo.reset()


def test_an_end_of_several_names_is_a_value_error_that_has_them():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = new_model(), new_model()

    with pytest.raises(ValueError, match=r"'head'.*'a\.head', 'b\.head'"):
        ebb.wrap(Two(), keep=["head"], **EVERYTHING)
    with pytest.raises(ValueError, match="no module 'ead'"):
        ebb.wrap(Two(), keep=["ead"], **EVERYTHING)
    ebb.wrap(Two(), keep=["a.head"], **EVERYTHING)
    one = Two()
    one.b = one.a
    ebb.wrap(one, keep=["head"], **EVERYTHING)
    inside = Two()
    inside.a.head, inside.b = Around(torch.nn.Identity()), torch.nn.Identity()
    inside.a.head.head = torch.nn.Identity()
    ebb.wrap(inside, keep=["head"], **EVERYTHING)


def test_a_deep_copy_keeps_its_head_and_what_comes_after():
    def saved(model, offloader):
        before = offloader.stats().saved.tensors
        model(data()).backward()
        return offloader.stats().saved.tensors - before

    model = WithLoss().eval()
    offloader = ebb.wrap(model, **EVERYTHING)
    assert saved(model, offloader) == saved(copy.deepcopy(model), offloader)


def test_unwrap_takes_all_hooks_off():
    x = data()
    model = new_model().eval()
    plain = model(x).detach()
    offloaders = [ebb.wrap(model, keep=[], **EVERYTHING), ebb.wrap(model.body, keep=[], **EVERYTHING)]
    copied, loaded, around = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), Around(copy.deepcopy(model))
    for each in (copied, loaded, around, model):
        if each is not loaded:
            each(x).sum().backward()
        before = [offloader.stats().saved.tensors for offloader in offloaders]
        assert ebb.unwrap(each) is each
        assert ebb.unwrap(each) is each
        each(x).sum().backward()
        assert [offloader.stats().saved.tensors for offloader in offloaders] == before
        assert torch.equal(torch.jit.script(getattr(each, "module", each))(x), plain)
        for module in each.modules():
            hooks = (module._forward_hooks, module._forward_pre_hooks, module._forward_hooks_always_called)
            assert not any(hooks)
    assert all(unguarded(offloader) for offloader in offloaders)
    assert min(before) > 0  # both had saved
    again = ebb.wrap(model, **EVERYTHING)
    model(x).sum().backward()
    assert again.stats().offloaded.tensors > 0


def test_unwrap_leaves_the_hooks_of_others():
    model = new_model()
    called = []
    model.register_forward_pre_hook(lambda *_: called.append("before"))
    ebb.wrap(model, **EVERYTHING)
    model.head.register_forward_hook(lambda *_: called.append("after"), always_call=True)
    ebb.unwrap(model)(data())
    assert called == ["before", "after"]


def test_unwrap_ends_a_guard_that_is_on():
    model = Fails()
    model.error = KeyboardInterrupt
    offloader = ebb.wrap(model, **EVERYTHING)
    with pytest.raises(KeyboardInterrupt):
        model(data())
    ebb.unwrap(model)
    assert unguarded(offloader)

    model = Calls()
    offloader = ebb.wrap(model, keep=[], **EVERYTHING)
    model(data(), [ebb.unwrap]).sum().backward()
    assert unguarded(offloader)


@pytest.mark.parametrize("order", ["compiled, then wrapped", "wrapped, then compiled"])
def test_unwrap_ends_what_is_compiled(order):
    torch._dynamo.reset()
    model = new_model().eval()
    called = torch.compile(model, backend="eager")
    offloader = ebb.wrap(called if order == "compiled, then wrapped" else model, **EVERYTHING)
    called(data()).sum().backward()
    saved = offloader.stats().saved.tensors
    assert saved > 0
    ebb.unwrap(called)(data()).sum().backward()
    assert offloader.stats().saved.tensors == saved
    assert unguarded(offloader)
    torch._dynamo.reset()


def test_unwrap_takes_modules():
    with pytest.raises(TypeError, match="unwrap"):
        ebb.unwrap(ebb.Offloader(**EVERYTHING))


@pytest.mark.parametrize(
    "export", [torch.jit.script, lambda model: torch.export.export(model, (data(),), strict=True).module()]
)
def test_exports_that_compile_hooks_say_what_to_do(export):
    torch._dynamo.reset()
    model = new_model().eval()
    ebb.wrap(model, **EVERYTHING)
    with pytest.raises((AttributeError, torch._dynamo.exc.Unsupported), match=r"ebb\.unwrap\(model\)"):
        export(model)
    with torch.no_grad():
        assert torch.equal(export(ebb.unwrap(copy.deepcopy(model)))(data()), model(data()))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "export",
    [
        lambda model: torch.jit.trace(model, data()),
        lambda model: torch.export.export(model, (data(),), strict=False).module(),
    ],
)
def test_exports_that_run_hooks_take_a_wrapped_model(export):
    model = new_model().eval()
    offloader = ebb.wrap(model, **EVERYTHING)
    with torch.no_grad():
        assert torch.equal(export(model)(data()), model(data()))
    assert unguarded(offloader)


class Lora(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.base = torch.nn.Linear(width, width, bias=False).requires_grad_(False)
        self.a, self.b = torch.nn.Linear(width, 2, bias=False), torch.nn.Linear(2, width, bias=False)
        self.register_buffer("scale", torch.full((width, width), 0.5))

    def forward(self, x):
        return torch.nn.functional.gelu(self.base(x) + self.b(self.a(x))) @ self.scale


LARGE = {"device": "cpu", "policy": ebb.policies.minimum_size("8KiB")}  # Lora's weights and buffers, and nothing else


def moved_in_a_step(model, offloader):
    before = offloader.stats().offloaded.tensors
    model(torch.ones(3, 64, dtype=model.scale.dtype)).sum().backward()
    return offloader.stats().offloaded.tensors - before


def replace_a_buffer(model):
    model.scale = torch.full((64, 64), 0.25)


def replace_a_weight(model):
    model.base.weight = torch.nn.Parameter(torch.ones(64, 64), requires_grad=False)


def give_other_data(model):
    model.base.weight.data = torch.ones(64, 64)


def add_a_part(model):
    model.a = torch.nn.Sequential(torch.nn.Linear(64, 64).requires_grad_(False), model.a)


def freeze(model):
    model.a = torch.nn.Linear(64, 64)
    model.b = torch.nn.Linear(64, 64)
    model.a.requires_grad_(False)


@pytest.mark.parametrize(
    "change",
    [
        torch.nn.Module.double,
        lambda model: model.to_empty(device="cpu"),
        lambda model: model.requires_grad_(True).base.requires_grad_(False),
        replace_a_buffer,
        replace_a_weight,
        give_other_data,
        add_a_part,
        freeze,
    ],
)
def test_frozen_weights_and_buffers_stay(change):
    model = Lora()
    offloader = ebb.wrap(model, keep=[], **LARGE)
    change(model)
    assert moved_in_a_step(model, offloader) == 0

    model = Lora()
    offloader = ebb.wrap(model, keep=[], **LARGE)
    assert moved_in_a_step(model, offloader) == 0
    change(model)
    assert moved_in_a_step(copy.deepcopy(model), offloader) == 0
    for _ in range(64):
        moved_in_a_step(model, offloader)
    assert moved_in_a_step(model, offloader) == 0


def test_weights_that_are_trained_for_a_while_stay():
    model = Lora()
    offloader = ebb.wrap(model, keep=[], **LARGE)
    for trained in (True, False, True):
        model.base.requires_grad_(trained)
        assert moved_in_a_step(model, offloader) == 0


def test_frozen_weights_that_are_managed_stay_managed_and_exact():
    def train(model):
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-4)
        losses = []
        for _ in range(5):
            loss = model(torch.linspace(-1, 1, 192).view(3, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return [*losses, *(each.detach().clone() for each in model.parameters())]

    torch.manual_seed(1)
    model = Lora()
    plain = train(copy.deepcopy(model))
    offloader = ebb.wrap(model, keep=[], **EVERYTHING)
    offloader.manage(model, device_bytes="8KiB", minimum_bytes=0)
    assert all(torch.equal(a, b) for a, b in zip(train(model), plain, strict=True))
    assert offloader.stats().managed.tensors > 0
