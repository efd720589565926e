import contextlib
import copy
import gc
import io
import os
import pickle
import threading
import warnings
from collections import OrderedDict

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.testing._internal.two_tensor import TwoTensor

import ebb
from conftest import run_python


def new_model():
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Embedding(32, 16),
        torch.nn.Linear(16, 64),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(64, 16),
        torch.nn.LayerNorm(16),
        torch.nn.Linear(16, 32, bias=False),
    )
    model[6].weight = model[0].weight  # tied
    return model


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "AdamW, amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


def train(model, optimizer, guard, steps=10, first=0):
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    seen = []
    for step in range(first, first + steps):
        for micro_batch in range(2):
            torch.manual_seed(100 * step + micro_batch)
            tokens = torch.randint(0, 32, (4, 8))
            with guard:
                logits = model(tokens)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())
            loss.backward()
        seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        schedule.step()
        seen.append(loss.detach())
    return seen + [each.detach().clone() for each in model.parameters()]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def home():
    return ebb.Offloader(device="cpu", policy=ebb.policies.minimum_size(1))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("device_bytes", [0, "8KiB", "1GiB"])
@pytest.mark.parametrize("saves_move", [False, True])
def test_managed_parameters_train_to_the_same_bits(home, optimizer, device_bytes, saves_move):
    plain = new_model()
    expected = train(plain, OPTIMIZERS[optimizer](plain.parameters()), contextlib.nullcontext())
    model = new_model()
    home.manage(model, device_bytes=device_bytes, minimum_bytes=0)
    guard = home if saves_move else contextlib.nullcontext()
    assert_equal(train(model, OPTIMIZERS[optimizer](model.parameters()), guard), expected)


def test_training_goes_on_from_a_checkpoint(home, tmp_path):
    plain = new_model()
    optimizer = OPTIMIZERS["AdamW"](plain.parameters())
    train(plain, optimizer, home)
    expected = train(plain, optimizer, home, first=10)

    model = new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    train(model, optimizer, home)
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint.pt")

    model = new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    weights, states = torch.load(tmp_path / "checkpoint.pt")
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    assert_equal(train(model, optimizer, home, first=10), expected)


def trained(home, **how):
    """A managed model and torch's optimizer after some steps, and what the same has that is not managed."""
    found = []
    for is_managed in (True, False):
        model = new_model()
        model.register_buffer("count", torch.arange(3))
        if is_managed:
            home.manage(model, **{"device_bytes": 0, "minimum_bytes": 0} | how)
        optimizer = OPTIMIZERS["AdamW"](model.parameters())
        train(model, optimizer, contextlib.nullcontext(), steps=2)
        found += [model, optimizer]
    return found


def saved_by_torch(known):
    file = io.BytesIO()
    torch.save(known, file)
    file.seek(0)
    return torch.load(file)


def saved_by_safetensors(known):
    safetensors = pytest.importorskip("safetensors.torch")
    return safetensors.load(safetensors.save({name: each for name, each in known.items() if not name.startswith("6.")}))


READERS = {
    "values": lambda known: dict(zip(known, known.values(), strict=True)),
    "items": lambda known: dict(known.items()),
    "get": lambda known: {name: known.get(name) for name in known},
    "pop": lambda known: {name: known.pop(name) for name in list(known)},
    "copy": lambda known: known.copy(),
    "dict": dict,
    "OrderedDict": OrderedDict,
    "unpacked": lambda known: {**known},
    "update": lambda known: [new := {}, new.update(known)][0],
    "pickle": lambda known: pickle.loads(pickle.dumps(known)),
    "deepcopy": copy.deepcopy,
    "torch.save": saved_by_torch,
    "safetensors": saved_by_safetensors,
    "tree_map": lambda known: torch.utils._pytree.tree_map(lambda each: each, known),
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("how", [{}, {"device_bytes": "1GiB"}, {"weights": False}, {"resident_bytes": "8KiB"}])
def test_a_state_dict_has_copies_that_everybody_reads(home, read, how):
    model, optimizer, plain, its_optimizer = trained(home, **how)
    found, expected = READERS[read](model.state_dict()), plain.state_dict()
    assert {*expected} - {*found} <= {"6.weight"}
    for name, each in found.items():
        assert each.data_ptr() != 0 and each.stride() == expected[name].stride() and not each.requires_grad
        assert torch.equal(torch.from_numpy(each.numpy()), expected[name])
    for number, state in its_optimizer.state_dict()["state"].items():
        found = READERS[read](optimizer.state_dict()["state"][number])
        assert found.keys() == state.keys()
        assert all(torch.equal(torch.from_numpy(each.numpy()), state[name]) for name, each in found.items())


def test_a_state_dict_has_one_copy_of_a_tied_weight_and_keeps_what_it_has_read(home):
    model, *_ = trained(home)
    known = model.state_dict()
    address = known["6.weight"].data_ptr()
    assert known["0.weight"].data_ptr() == address != known["1.weight"].data_ptr()
    assert known["6.weight"] is known["6.weight"]
    assert saved_by_torch(known)["0.weight"].data_ptr() != 0
    copied = copy.deepcopy(known)
    assert copied["0.weight"].data_ptr() == copied["6.weight"].data_ptr() != address
    copied = copy.deepcopy(model.state_dict())
    assert type(copied) is OrderedDict and copied._metadata == known._metadata
    assert copied["0.weight"].data_ptr() == copied["6.weight"].data_ptr()


def test_a_state_dict_follows_the_weights_as_one_without_ebb_does(home):
    model, optimizer, plain, its_optimizer = trained(home)
    known, expected = model.state_dict(), plain.state_dict()
    states = optimizer.state_dict()
    for _ in range(2):
        for name in expected:
            assert torch.equal(known[name], expected[name]), name
        train(model, optimizer, contextlib.nullcontext(), steps=1, first=50)
        train(plain, its_optimizer, contextlib.nullcontext(), steps=1, first=50)
    for number, state in its_optimizer.state_dict()["state"].items():
        assert all(torch.equal(states["state"][number][name], value) for name, value in state.items())


def test_two_optimizers_with_one_state_dict_do_not_share_steps(home):
    model, optimizer, *_ = trained(home)
    other = OPTIMIZERS["AdamW"](model.parameters())
    other.load_state_dict(optimizer.state_dict())
    steps = [state["step"] for state in optimizer.state.values()]
    assert steps and not any(own["step"] is step for own, step in zip(other.state.values(), steps, strict=True))


def test_a_state_dict_copies_what_is_asked_for_alone(home):
    model, *_ = trained(home)
    copied = []
    original = ebb._state_dict.to_host
    try:
        ebb._state_dict.to_host = lambda value: copied.append(value.shape) or original(value)
        known = model.state_dict()
        assert "1.weight" in known and len(known) == 9 and list(known)[0] == "count"
        assert copied == []
        known["1.bias"], known["1.bias"]
    finally:
        ebb._state_dict.to_host = original
    assert copied == [model[1].bias.shape]


def test_state_dicts_in_modules_of_others_have_their_names(home):
    model, _, plain, _ = trained(home)
    outer = torch.nn.ModuleDict({"inner": model, "other": torch.nn.Linear(2, 2)})
    outer.register_state_dict_post_hook(lambda module, known, prefix, metadata: known.update(mine=torch.ones(1)))
    known = outer.state_dict(prefix="a.")
    assert known["a.inner.1.weight"].data_ptr() != 0 and known["mine"].item() == 1 and "a.other.bias" in known
    assert torch.equal(known["a.inner.1.weight"], plain[1].weight)
    assert type(torch.nn.Linear(2, 2).state_dict()) is OrderedDict
    into = OrderedDict()
    assert model.state_dict(destination=into) is into  # what others make of it is theirs


def test_a_state_dict_may_have_the_managed_tensors_themselves(home):
    model, *_ = trained(home)
    known = model.state_dict(keep_vars=True)
    assert known["1.weight"] is model[1].weight
    with torch.no_grad():
        known["1.weight"].fill_(2.0)
    assert torch.equal(model.state_dict()["1.weight"], torch.full((64, 16), 2.0))


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_is_loaded_by_managed_modules_and_others(home, assign):
    model, optimizer, plain, its_optimizer = trained(home)
    expected = train(plain, its_optimizer, contextlib.nullcontext(), first=2)
    for manage in (False, True):
        other = new_model()
        other.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        if manage:
            home.manage(other, device_bytes=0, minimum_bytes=0)
        known = model.state_dict()
        assert not other.load_state_dict(known, assign=assign).missing_keys
        if assign:
            other[6].weight = other[0].weight
        its = OPTIMIZERS["AdamW"](other.parameters())
        its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert_equal(train(other, its, contextlib.nullcontext(), first=2), expected)
    with pytest.raises(RuntimeError, match="Unexpected"):
        torch.nn.Linear(2, 2).load_state_dict(model.state_dict())
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert_equal(train(model, optimizer, contextlib.nullcontext(), first=2), expected)


def test_states_that_torchs_optimizer_loads_are_managed(home):
    model, optimizer, _, its_optimizer = trained(home)
    known = copy.deepcopy(its_optimizer.state_dict())
    before = home.stats().managed.bytes
    optimizer.load_state_dict(known)
    gc.collect()
    assert home.stats().managed.bytes == before
    for state in optimizer.state.values():
        state["step"].numpy()
        with pytest.raises(RuntimeError, match="comes and goes"):
            state["exp_avg"].numpy()
    assert known["state"][0]["exp_avg"].numpy().any()  # is nobody's


def test_a_copy_of_a_managed_model_has_a_plain_state_dict(home):
    model, _, plain, _ = trained(home)
    copied = copy.deepcopy(model)
    assert type(copied.state_dict()) is OrderedDict
    assert_equal(list(copied.state_dict().values()), list(plain.state_dict().values()))


def test_legacy_methods_of_a_managed_tensor_make_tensors_of_its_kind(home):
    for dtype in (torch.float32, torch.bfloat16):
        managed = torch.ones(64, dtype=dtype)
        home.manage([managed], device_bytes=0, minimum_bytes=0)
        assert torch.equal(managed.new_tensor([1, 2]), torch.tensor([1, 2], dtype=dtype))
        assert managed.new_tensor([1, 2], dtype=torch.int64, requires_grad=False).dtype == torch.int64
        assert managed.new(2, 3).shape == (2, 3) and managed.new([1.0]).dtype == dtype
    assert torch.ones(2).new_tensor([1]).dtype == torch.float32


def test_compiled_autograd_over_managed_parameters_is_one_clear_error(home):
    model = torch.nn.Linear(16, 16)
    home.manage(model, device_bytes=0, minimum_bytes=0)
    loss = model(torch.ones(2, 16)).sum()
    with compiled_autograd._enable(torch.compile(backend="eager")), pytest.raises(
        NotImplementedError, match="ebb: compiled autograd"
    ):
        loss.backward()
    model(torch.ones(2, 16)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((16, 16), 2.0))


SHARED = """
import torch, ebb
home = ebb.Offloader("cpu")
managed, plain = torch.ones(64), torch.ones(64)
home.manage([managed], device_bytes=0, minimum_bytes=0)

def check():
    assert not managed.is_shared()
    for share in (managed.share_memory_, managed.untyped_storage().share_memory_):
        try:
            share()
        except RuntimeError as error:
            assert "cannot be shared with other processes" in str(error), error
        else:
            raise AssertionError("no error")
    assert torch.equal(managed + 0, torch.ones(64))

check()
with torch.profiler.profile(record_shapes=True, profile_memory=True):
    check()
assert plain.share_memory_().is_shared()
"""


def test_sharing_a_managed_tensors_memory_is_one_clear_error():
    run_python(SHARED)


@pytest.mark.parametrize(
    "read",
    [
        lambda each: each.detach().numpy(),
        lambda each: each.detach().tolist(),
        lambda each: each.data_ptr(),
        lambda each: each.untyped_storage().data_ptr(),
        lambda each: each.untyped_storage().tolist(),
        lambda each: torch.utils.dlpack.to_dlpack(each.detach()),
    ],
)
def test_what_reads_memory_without_an_operation_is_refused(home, read):
    model = new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    with pytest.raises(RuntimeError, match="comes and goes"):
        read(model[1].weight)


def test_memory_of_others_is_refused(home):
    parameter = torch.nn.Parameter(torch.from_numpy(torch.ones(64).numpy()))
    with pytest.raises(ValueError, match="does not own"):
        home.manage([parameter], device_bytes=0, minimum_bytes=0)
    parameter.data = parameter.data.clone()
    home.manage([parameter], device_bytes=0, minimum_bytes=0)
    assert torch.equal(parameter * 1, torch.ones(64))


def test_a_managed_tensor_says_where_to_split_another(home):
    places = torch.tensor([2, 5, 9])
    home.manage([places], device_bytes=0, minimum_bytes=0)
    assert [len(each) for each in torch.tensor_split(torch.arange(20.0), places)] == [2, 3, 4, 11]


def test_calls_of_manage_gather_no_hooks(home):
    model = new_model()
    for _ in range(5):
        home.manage(model, device_bytes=0, minimum_bytes=0)
    assert len(model[1].weight._post_accumulate_grad_hooks) == 0


def test_what_has_no_room_is_said_once():
    lines = run_python(NO_ROOM).splitlines()
    warnings = [line for line in lines if "warning" in line and "stay on the device" in line]
    assert len(warnings) == 1
    assert "ebb: ebb:" not in warnings[0]


NO_ROOM = """
import os, torch, ebb
os.dup2(1, 2)  # the log, too, is printed
home = ebb.Offloader("cpu", capacity_bytes="32KiB")
layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
home.manage(layers, device_bytes=0, minimum_bytes=0)
optimizer = ebb.AdamW(layers.parameters())
for _ in range(3):
    layers(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_operations_read_is_there(home):
    model, plain = new_model(), new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    assert repr(model[1].weight.detach().clone()) == repr(plain[1].weight.detach())
    assert torch.equal(copy.deepcopy(model)[1].weight, plain[1].weight)
    assert model[1].weight.detach().clone().tolist() == plain[1].weight.tolist()
    assert model[1].weight[3, 5].item() == plain[1].weight[3, 5].item()
    assert torch.equal(model[1].weight.data.half(), plain[1].weight.data.half())


def test_hooks_of_the_program_are_called(home):
    model = new_model()
    called = []
    model[1].weight.register_post_accumulate_grad_hook(lambda each: called.append("before"))
    home.manage(model, device_bytes=0, minimum_bytes=0)
    model[1].weight.register_post_accumulate_grad_hook(lambda each: called.append("after"))
    model(torch.arange(8)).sum().backward()
    assert called == ["before", "after"]
    with pytest.raises(RuntimeError, match="comes and goes"):
        model[1].weight.grad.numpy()


def test_some_parameters_may_be_chosen(home):
    model = new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0, which=lambda name, each: name.startswith("1."))
    with pytest.raises(RuntimeError, match="comes and goes"):
        model[1].weight.data_ptr()
    assert model[4].weight.data_ptr() != 0


def step_with_warnings(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.arange(8)).float().sum().backward()
    return [str(each.message) for each in caught if "given to manage()" in str(each.message)]


def test_a_warning_says_once_that_parameters_have_other_memory_since(home):
    model = new_model()
    for _ in range(5):  # looks are few once many passes have gone by, and start anew with manage()
        step_with_warnings(model)
    home.manage(model, device_bytes=0, minimum_bytes=0)
    assert step_with_warnings(model) == []
    model.to(torch.bfloat16)
    (said,) = step_with_warnings(model)
    assert "7 parameters" in said
    assert "model.to(dtype)" in said
    assert sum((step_with_warnings(model) for _ in range(8)), []) == []


def test_released_parameters_are_not_warned_of(home):
    model = new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    home.release(model[4])
    home.release(model[1].weight)
    assert sum((step_with_warnings(model) for _ in range(8)), []) == []


def test_small_parameters_stay_by_default(home):
    model = new_model()
    with pytest.warns(UserWarning, match="manages nothing"):
        home.manage(model, device_bytes=0)
    assert model[1].weight.data_ptr() != 0


def test_a_warning_says_that_nothing_is_managed(home):
    with pytest.warns(UserWarning, match="no tensor was chosen"):
        home.manage([], device_bytes=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        home.manage([torch.ones(4), torch.ones(8)], device_bytes=0, minimum_bytes=32)
        home.manage([torch.ones(8)], device_bytes=0)  # the first call has said how


def test_what_is_no_tensor_is_refused(home):
    for what in ("abc", [None], {"weight": torch.ones(4)}):
        with pytest.raises(TypeError, match="manage"):
            home.manage(what, device_bytes=0)


def test_what_cannot_be_managed_is_refused(home):
    with pytest.raises(ValueError, match="dense"):
        home.manage([torch.eye(4).to_sparse()], device_bytes=0)
    with pytest.raises(ValueError, match="dense"):
        home.manage([torch.nested.nested_tensor([torch.ones(3), torch.ones(2)])], device_bytes=0, minimum_bytes=0)
    with pytest.raises(ValueError, match="TwoTensor wraps other tensors"):  # as FSDP's DTensor does
        home.manage([TwoTensor(torch.ones(4), torch.ones(4))], device_bytes=0, minimum_bytes=0)
    with pytest.raises(TypeError, match="module"):
        home.manage([torch.ones(4)], device_bytes=0, which=lambda name, each: True)
    with pytest.raises(ValueError, match="device_bytes"):
        home.manage([torch.ones(4)], device_bytes="many")
    with pytest.raises(ValueError, match="device_bytes is not set"):
        home.manage([torch.ones(4)])


def test_a_budget_decides_how_much_of_managed_tensors_is_on_the_device():
    plain, model = new_model(), new_model()
    expected = train(plain, OPTIMIZERS["AdamW"](plain.parameters()), contextlib.nullcontext())
    budgeted = ebb.Offloader(device="cpu", device_budget="64KiB", planned_minimum_bytes=1)
    budgeted.manage(model, minimum_bytes=0)
    assert budgeted.stats().managed_on_device.capacity_bytes == 16 << 10
    assert_equal(train(model, OPTIMIZERS["AdamW"](model.parameters()), budgeted), expected)
    assert "managed: at most" in budgeted.explain()
    bound = budgeted.plan_report().managed_device_bytes
    assert budgeted.stats().managed_on_device.capacity_bytes == bound


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW, foreach", "AdamW, fused"])
def test_no_more_is_on_the_device_than_the_bound_and_what_one_parameter_takes(home, optimizer):
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(16)))
    each = 64 * 64 * 4
    home.manage(model, device_bytes=2 * each, minimum_bytes=0)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(3):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = home.stats()
    assert stats.managed.tensors >= 3 * 16 and stats.managed.bytes == stats.managed.tensors * each
    assert stats.managed_on_device.capacity_bytes == 2 * each
    # An operation takes up to four storages; a list's operation is cut into parts of the bound, or of one place.
    assert stats.managed_on_device.peak_bytes <= 6 * each


@pytest.mark.parametrize("device_bytes", [0, "8KiB", "1GiB"])
def test_operations_on_lists_give_the_same_in_parts(home, device_bytes):
    torch.manual_seed(1)
    plain = [torch.randn(n + 1, 16) for n in range(20)]
    managed = [each.clone() for each in plain]
    home.manage(managed, device_bytes=device_bytes, minimum_bytes=0)
    assert_equal(torch._foreach_norm(managed), torch._foreach_norm(plain))
    assert_equal(torch._foreach_add(managed, managed, alpha=2), torch._foreach_add(plain, plain, alpha=2))
    assert_equal(torch._foreach_mul(managed, [float(n) for n in range(20)]), torch._foreach_mul(plain, list(map(float, range(20)))))
    for tensors in (managed, plain):
        torch._foreach_addcmul_(tensors, [each * 2 for each in plain_copy(tensors)], plain_copy(tensors), torch.arange(20.0))
        torch._foreach_mul_(tensors, 3.0)
    assert_equal([each.clone() for each in managed], plain)


def plain_copy(tensors):
    return [each.clone() for each in tensors]


def test_parameters_on_meta_get_memory_and_stay_what_they_are(home):
    with torch.device("meta"):
        model = new_model()
    optimizer = ebb.AdamW(model.parameters())
    before = list(model.parameters())
    home.manage(model, device_bytes=0, minimum_bytes=0)
    assert model[0].weight is model[6].weight
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert all(isinstance(each, torch.nn.Parameter) and each.is_cpu for each in model.parameters())
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], before, strict=True))
    model.load_state_dict(new_model().state_dict())
    plain = new_model()
    assert_equal(train(model, optimizer, home), train(plain, ebb.AdamW(plain.parameters()), home))


def test_a_gradient_that_a_hook_has_looked_at_goes_home(home):
    model = new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)

    def look(parameter):
        parameter.grad.norm()

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(look)
    model(torch.arange(8)).sum().backward()
    for each in model.parameters():
        with pytest.raises(RuntimeError, match="comes and goes"):
            each.grad.numpy()


class Tagged(torch.nn.Parameter):
    pass


@pytest.mark.parametrize("update_in", ["step", "backward"])
def test_parameters_on_meta_keep_hooks_attributes_and_class(home, update_in):
    parameter = Tagged(torch.empty(4, 4, device="meta"))
    parameter.tag = "x"
    called = []
    parameter.register_hook(lambda gradient: called.append("hook"))
    parameter.register_post_accumulate_grad_hook(lambda each: called.append("after"))
    optimizer = ebb.AdamW([parameter], update_in=update_in)
    home.manage([parameter], device_bytes=0, minimum_bytes=0)
    assert type(parameter) is Tagged and parameter.tag == "x"
    with torch.no_grad():
        parameter.fill_(1.0)
    parameter.square().sum().backward()
    optimizer.step()
    assert called == ["hook", "after"]
    assert not torch.equal(parameter.detach().clone(), torch.ones(4, 4))


def test_a_module_may_be_moved_to_where_it_is(home):
    model, plain = new_model(), new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    model.to(home.device)
    with pytest.raises(RuntimeError, match="comes and goes"):
        model[1].weight.data_ptr()
    assert_equal([each.clone() for each in model.parameters()], list(plain.parameters()))


def test_an_offloader_that_is_off_makes_parameters_too():
    off = ebb.Offloader("cpu", enabled=False)
    with torch.device("meta"):
        model = new_model()
    off.manage(model, device_bytes=0)
    assert off.device == torch.device("cpu") and all(each.is_cpu for each in model.parameters())


def test_a_gradient_that_dlpack_has_stays(home):
    model = new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    taken = {}

    def take(parameter):
        if parameter not in taken:
            taken[parameter] = torch.utils.dlpack.to_dlpack(parameter.grad)

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(take)
    for _ in range(2):
        model(torch.arange(8)).sum().backward()
    for parameter, capsule in taken.items():
        alias = torch.utils.dlpack.from_dlpack(capsule)
        assert torch.equal(alias, parameter.grad) and alias.data_ptr() == parameter.grad.data_ptr()


def test_a_gradient_that_another_thread_is_writing_does_not_leave(home):
    has_begun, may_end = threading.Event(), threading.Event()

    def write_late(tensor):
        alias = tensor.numpy()  # good until the operation ends
        has_begun.set()
        assert may_end.wait(60)
        alias[:] = 5

    with torch.library._scoped_library("ebb_test_manage", "DEF") as library:
        library.define("write_late(Tensor(a!) tensor) -> ()")
        library.impl("write_late", write_late, "CPU")
        layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(4)))
        others = []

        def give(parameter):
            others.append(threading.Thread(target=torch.ops.ebb_test_manage.write_late, args=[parameter.grad]))
            others[0].start()
            assert has_begun.wait(60)

        layers[3].weight.register_post_accumulate_grad_hook(give)
        home.manage(layers, device_bytes=0, minimum_bytes=1)
        layers(torch.ones(2, 32)).sum().backward()
        may_end.set()
        others[0].join()
        assert torch.equal(layers[3].weight.grad.clone(), torch.full((32, 32), 5.0))


def test_a_look_at_a_storage_leaves_the_gradient_managed(home):
    layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(4)))
    home.manage(layers, device_bytes=0, minimum_bytes=1)
    for each in layers.parameters():
        each.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.untyped_storage().nbytes() and None)
    layers(torch.ones(2, 32)).sum().backward()
    assert home.stats().managed.tensors == 8


def test_a_storage_that_the_program_holds_leaves_the_gradient_alone(home):
    layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(2)))
    home.manage(layers, device_bytes=0, minimum_bytes=1)
    held = []
    for each in layers.parameters():
        each.register_post_accumulate_grad_hook(lambda parameter: held.append(parameter.grad.untyped_storage()))
    layers(torch.ones(2, 32)).sum().backward()
    assert home.stats().managed.tensors == 2 and all(each.data_ptr() != 0 for each in held)


@pytest.mark.parametrize("optimizer", ["torch", "step", "next_use"])
def test_what_is_frozen_at_first_has_its_gradients_managed_later(home, optimizer):
    layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(4)))
    layers[:2].requires_grad_(False)
    home.manage(layers, device_bytes=0, minimum_bytes=1)
    layers.requires_grad_(True)
    if optimizer == "torch":
        optimizer = torch.optim.AdamW(layers.parameters(), foreach=False)
    else:
        optimizer = ebb.AdamW(layers.parameters(), update_in=optimizer)
    for expected in (8, 16):
        layers(torch.ones(2, 32)).sum().backward()
        assert home.stats().managed.tensors == expected
        optimizer.step()
        optimizer.zero_grad()


def test_gradients_are_managed_under_reentrant_checkpoints(home):
    layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(4)))
    home.manage(layers, device_bytes=0, minimum_bytes=1)
    x = torch.ones(2, 32, requires_grad=True)
    for layer in layers:
        x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
    x.sum().backward()
    assert home.stats().managed.tensors == 8
    for each in layers.parameters():
        with pytest.raises(RuntimeError, match="comes and goes"):
            each.grad.data_ptr()


@pytest.mark.parametrize("update_in", ["torch", "step", "next_use"])
def test_what_is_released_is_as_before(home, update_in):
    def trained(release):
        model = new_model()
        home.manage(model, device_bytes=0, minimum_bytes=0)
        kind = torch.optim.AdamW if update_in == "torch" else ebb.AdamW
        optimizer = kind(model.parameters(), **({} if update_in == "torch" else {"update_in": update_in}))
        train(model, optimizer, home, steps=2)
        if release:
            home.release(model)
            assert home.stats().managed.tensors == 0
            model[1].weight.detach().numpy()
            for state in optimizer.state.values():
                state["exp_avg"].numpy()
        found = train(model, optimizer, home, steps=2)
        assert (home.stats().managed.tensors == 0) == release
        return found

    assert_equal(trained(True), trained(False))


def comes_and_goes(tensor):
    try:
        return tensor.data_ptr() == 0
    except RuntimeError as error:
        return "comes and goes" in str(error)


@torch.no_grad()
def buffers_like(parameters):
    return [torch.zeros_like(each) for each in parameters]


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name.startswith("AdamW")])
def test_states_that_a_step_of_torchs_makes_are_managed_and_the_programs_buffers_are_not(home, optimizer):
    model = new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    averages = buffers_like(model.parameters())
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    train(model, optimizer, contextlib.nullcontext(), steps=1)
    for each in averages + buffers_like(model.parameters()):
        assert each.data_ptr() != 0
    for state in optimizer.state.values():
        assert all(comes_and_goes(value) for name, value in state.items() if name != "step")


class Wrapping(torch.optim.Optimizer):
    """An optimizer that another steps inside of, as Lookahead's, with states of its own."""

    def __init__(self, inner, parameters):
        super().__init__(parameters, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure=None):
        (parameter,) = self.param_groups[0]["params"]
        self.state[parameter]["before"] = torch.zeros_like(parameter)
        self.inner.step(closure)
        self.state[parameter]["after"] = torch.zeros_like(parameter)


class Derived(torch.optim.AdamW):
    def step(self, closure=None):
        made = super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["slow"] = torch.zeros_like(parameter)
        return made


def parameters_with_gradients(home):
    parameters = [torch.nn.Parameter(torch.ones(16, 16)) for _ in range(2)]
    home.manage(parameters, device_bytes=0, minimum_bytes=0)
    sum(each.sum() for each in parameters).backward()
    return parameters


def test_a_step_inside_of_another_ends_alone(home):
    mine, inners = parameters_with_gradients(home)
    optimizer = Wrapping(torch.optim.AdamW([inners]), [mine])
    optimizer.step()
    assert comes_and_goes(optimizer.state[mine]["before"]) and comes_and_goes(optimizer.state[mine]["after"])
    assert comes_and_goes(optimizer.inner.state[inners]["exp_avg"])
    assert not any(comes_and_goes(each) for each in buffers_like([mine, inners]))


def test_a_step_of_a_derived_optimizer_makes_states(home):
    parameters = parameters_with_gradients(home)
    optimizer = Derived(parameters)
    optimizer.step()
    assert all(comes_and_goes(optimizer.state[each][name]) for each in parameters for name in ("exp_avg", "slow"))


def test_a_step_that_raises_has_ended(home):
    parameters = parameters_with_gradients(home)
    for optimizer in (torch.optim.AdamW(parameters), Derived(parameters), torch.optim.SGD(parameters)):
        with contextlib.suppress(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        assert not any(comes_and_goes(each) for each in buffers_like(parameters))


def test_a_step_is_of_its_own_parameters_and_thread(home):
    mine, other = parameters_with_gradients(home)
    made = []

    class Watching(torch.optim.Optimizer):
        def step(self, closure=None):
            made.extend(buffers_like([mine, other]))
            thread = threading.Thread(target=lambda: made.extend(buffers_like([mine])))
            thread.start()
            thread.join()
            made.append(torch.zeros_like(mine))  # with gradients, as a closure's model does

    Watching([mine], {}).step()
    assert [comes_and_goes(each) for each in made] == [True, False, False, False]


FALLBACK = """
import torch, ebb
name = "TESTING_ONLY_GenericMode"
has_fallback = lambda: torch._C._dispatch_has_backend_fallback(torch._C._parse_dispatch_key(name))
home = ebb.Offloader("cpu")
assert not has_fallback()
if OTHERS:
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda *arguments: None, name)
try:
    home.manage([torch.ones(4)], device_bytes=0, minimum_bytes=0)
except RuntimeError as error:
    assert OTHERS and "multiple backend fallbacks" in str(error), error
else:
    assert not OTHERS and has_fallback()
"""


@pytest.mark.parametrize("others", [False, True])
def test_operations_are_observed_from_the_first_managed_tensor_on_unless_somebody_else_observes_them(others):
    run_python(f"OTHERS = {others}" + FALLBACK)


PROFILED = """
import torch, ebb
from torch.profiler import ProfilerActivity, profile
from test_manage import new_model, train
home = ebb.Offloader("cpu", ebb.policies.minimum_size(1))
plain = new_model()
expected = train(plain, torch.optim.AdamW(plain.parameters()), home)
for options in ({"with_stack": True}, {"record_shapes": True}, {"with_flops": True}, {"profile_memory": True, "with_modules": True}):
    model = new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    with profile(activities=[ProfilerActivity.CPU], **options) as seen:
        found = train(model, torch.optim.AdamW(model.parameters()), home)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    names = {each.name for each in seen.events()}
    assert {"aten::addmm", "aten::embedding", "aten::native_layer_norm"} <= names, names
    try:
        model[1].weight.data_ptr()
        raise SystemExit("data_ptr() is not refused")
    except RuntimeError as error:
        assert "comes and goes" in str(error)
with profile(activities=[ProfilerActivity.CPU], with_stack=True):
    try:
        model[1].weight.data_ptr()
        raise SystemExit("data_ptr() is not refused while a profiler runs")
    except RuntimeError:
        pass
"""


def test_profilers_see_operations_on_managed_tensors():
    tests = os.path.dirname(__file__)
    assert "Exception in RecordFunction" not in run_python(f"import os, sys; sys.path.insert(0, {tests!r}); os.dup2(1, 2)" + PROFILED)


COLLECTIVE = """
import os, sys, torch, ebb
import torch.distributed as dist

def work(rank, path):
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{path}")
    home = ebb.Offloader("cpu", ebb.policies.minimum_size(1))
    tensors = [torch.full((1 << 14,), float(rank + n)) for n in range(6)]
    home.manage(tensors, device_bytes=0, minimum_bytes=0)
    for turn in range(20):
        works = [dist.all_reduce(each, async_op=True) for each in tensors]
        for each in works:
            each.wait()
        for each in tensors:
            dist.broadcast(each, src=turn % 2)
            each.mul_(0.5)
    for n, each in enumerate(tensors):
        assert torch.equal(each.clone(), torch.full((1 << 14,), n + 0.5)), (n, each.clone())
    for turn in range(3):
        mine, other = tensors[0], tensors[1]
        mine.fill_(float(rank + turn))
        if turn < 2:
            works = [dist.irecv(other, 1 - rank), dist.isend(mine, 1 - rank)]
            for each in works:
                each.wait()
            del works
        elif rank == 0:
            dist.send(mine, 1)
            dist.recv(other, 1)
        else:
            dist.recv(other, 0)
            dist.send(mine, 0)
        assert torch.equal(other.clone(), torch.full((1 << 14,), float(1 - rank + turn)))
    parts = [torch.zeros(4) for _ in range(2)]
    home.manage(parts, device_bytes=0, minimum_bytes=0)
    dist.all_gather(parts, torch.full((4,), float(rank)))
    assert torch.equal(parts[1].clone(), torch.ones(4)) and torch.equal(parts[0].clone(), torch.zeros(4))
    dist.destroy_process_group()

children = []
for rank in range(2):
    child = os.fork()
    if child == 0:
        work(rank, PATH)
        sys.stdout.flush()
        os._exit(0)
    children.append(child)
assert all(os.waitpid(each, 0)[1] == 0 for each in children)
"""


def test_collectives_find_the_bytes_until_they_are_over(tmp_path):
    run_python(f"PATH = {str(tmp_path / 'store')!r}" + COLLECTIVE)


LAZY_CLONE_WRITES = {
    "none": lambda tensor, clone: (tensor * 1).sum(),
    "of the tensor": lambda tensor, clone: tensor.add_(1),
    "of several tensors": lambda tensor, clone: torch._foreach_add_([tensor], 1),
    "of the clone": lambda tensor, clone: clone.add_(1),
}


@pytest.mark.parametrize("write", LAZY_CLONE_WRITES)
def test_a_lazy_clone_of_a_managed_tensor_sees_no_later_write(write):
    def run(tensor):
        clone = torch._lazy_clone(tensor)
        LAZY_CLONE_WRITES[write](tensor, clone)
        return tensor.clone(), clone.clone()

    managed = torch.arange(4096.0)
    home = ebb.Offloader("cpu")
    home.manage([managed], device_bytes=0, minimum_bytes=0)
    for found, wanted in zip(run(managed), run(torch.arange(4096.0)), strict=True):
        assert torch.equal(found, wanted)


class _Squared(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return (x @ w) ** 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        gradient = 2 * (x @ w) * gradient
        return gradient @ w.mT, x.mT @ gradient


HIGHER_ORDER = {
    "vmap of a Function": lambda x, w: torch.vmap(lambda y: _Squared.apply(y[None], w))(x),
    "cond": lambda x, w: torch.cond(x.sum() > 0, lambda x, w: x @ w, lambda x, w: x - w.sum(), (x, w)),
    "map": lambda x, w: torch._higher_order_ops.map(lambda y, w: y @ w, x, w),
    "nested_compile_region": lambda x, w: torch.compile(
        lambda x: torch.compiler.nested_compile_region(lambda x: x @ w)(x), backend="aot_eager"
    )(x),
}


@pytest.mark.parametrize("program", HIGHER_ORDER)
def test_higher_order_operators_take_managed_tensors(home, program):
    def gradient(manage):
        torch.manual_seed(1)
        x, w = torch.randn(5, 8), torch.nn.Parameter(torch.randn(8, 8))
        if manage:
            home.manage([w], device_bytes=0, minimum_bytes=0)
        HIGHER_ORDER[program](x, w).sum().backward()
        return w.grad.clone()

    assert torch.equal(gradient(True), gradient(False))


def test_mutation_on_saved_tensors_is_refused_for_managed_ones(home):
    w = torch.nn.Parameter(torch.ones(8, 8))
    home.manage([w], device_bytes=0, minimum_bytes=0)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        x = torch.ones(8, 8, requires_grad=True)
        y = x.sin()
        z = (y**2).sum()
        y.mul_(2)  # what is not managed may be written
        z.backward()
        assert torch.equal(x.grad, 2 * torch.ones(8, 8).sin() * torch.ones(8, 8).cos())
        with pytest.raises(RuntimeError, match="allow_mutation_on_saved_tensors knows tensors by their addresses"):
            (x @ w).sum()
