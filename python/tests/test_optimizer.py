import contextlib
import copy
import gc
import weakref
from functools import partial

import pytest
import torch

import ebb
from test_manage import assert_equal, new_model, train


@pytest.fixture
def home():
    return ebb.Offloader(device="cpu", policy=ebb.policies.minimum_size(1))


def new_half_model():
    model = new_model()
    model[3].p = 0.0
    return model.bfloat16()


class PlainWithMasters(torch.optim.Optimizer):
    """What ebb's optimizer must equal for bfloat16: torch's over float32 copies."""

    def __init__(self, kind, parameters, **options):
        parameters = list(parameters)
        super().__init__(parameters, {})
        self.masters = [each.detach().float().requires_grad_() for each in parameters]
        self.inner = getattr(torch.optim, kind)(self.masters, foreach=False, **options)
        self.param_groups = self.inner.param_groups
        self.parameters = parameters

    @torch.no_grad()
    def step(self, closure=None):
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)

    def zero_grad(self, set_to_none=True):
        for parameter in self.parameters:
            parameter.grad = None


OPTIONS = [
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True, "weight_decay": 0.0}),
    ("AdamW", {"maximize": True, "betas": (0.8, 0.9)}),
    ("Adam", {}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("SGD", {"weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "maximize": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
@pytest.mark.parametrize("managed", [False, True])
def test_float32_has_the_bits_of_torch(home, kind, options, managed):
    plain, model = new_model(), new_model()
    torchs = getattr(torch.optim, kind)(plain.parameters(), lr=1e-2, foreach=False, **options)
    expected = train(plain, torchs, home)
    if managed:
        home.manage(model, device_bytes="8KiB", minimum_bytes=0)
    assert_equal(train(model, getattr(ebb, kind)(model.parameters(), lr=1e-2, **options), home), expected)


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("number", ["tensor", "float32"])
def test_options_that_round_as_tensors_or_numpys_numbers_have_the_bits_of_torch(kind, number):
    convert = torch.tensor if number == "tensor" else pytest.importorskip("numpy").float32
    options = {"lr": convert(0.013), "weight_decay": 0.1}
    if kind != "SGD" and number == "tensor":
        options["betas"] = (convert(0.87), convert(0.983))
    plain, model = new_model(), new_model()
    expected = steps_of(plain, getattr(torch.optim, kind)(plain.parameters(), foreach=False, **options))
    assert_equal(steps_of(model, getattr(ebb, kind)(model.parameters(), **options)), expected)


@pytest.mark.parametrize(("kind", "options"), OPTIONS)
@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize("update_in", ["step", "next_use"])
def test_bfloat16_has_the_bits_of_float32_masters(home, kind, options, managed, update_in):
    plain, model = new_half_model(), new_half_model()
    expected = train(plain, PlainWithMasters(kind, plain.parameters(), lr=1e-2, **options), home)
    if managed:
        home.manage(model, device_bytes=0, minimum_bytes=0)
    optimizer = getattr(ebb, kind)(model.parameters(), lr=1e-2, update_in=update_in, **options)
    assert_equal(train(model, optimizer, home), expected)


WRITES = {
    "copy_": lambda weight, value: weight.copy_(value),
    "data.copy_": lambda weight, value: weight.data.copy_(value),
    "data =": lambda weight, value: setattr(weight, "data", value),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize("update_in", ["step", "backward", "next_use"])
@pytest.mark.parametrize("update_on", ["device", "cpu"])
def test_a_weight_that_the_program_writes_counts_and_the_rest_keeps_its_master(home, write, managed, update_in, update_on):
    def run(optimizer_of, with_masters):
        torch.manual_seed(1)
        weight = torch.nn.Parameter(torch.randn(8, 16).bfloat16())
        if managed:
            home.manage([weight], device_bytes=0, minimum_bytes=0)
        optimizer = optimizer_of([weight])
        for step in range(6):
            weight.sin().float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                with torch.no_grad():
                    value = weight.clone()
                    value[:, 3:7] = 0.25
                    if with_masters:  # which the program has to write, too
                        optimizer.masters[0][:, 3:7] = 0.25
                    WRITES[write](weight, value)
        return weight.detach().clone()

    def ours(parameters):
        return ebb.AdamW(parameters, lr=1e-2, update_in=update_in, update_on=update_on)

    found = run(ours, False)
    if update_on == "device":
        assert torch.equal(found, run(lambda parameters: PlainWithMasters("AdamW", parameters, lr=1e-2), True))
    else:  # whose kernels round otherwise
        expected = run(lambda parameters: PlainWithMasters("AdamW", parameters, lr=1e-2), True)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("update_in", ["step", "next_use"])
@pytest.mark.parametrize("elements_at_once", [1 << 24, 40])
def test_weights_may_be_loaded_before_or_after_their_masters(monkeypatch, home, update_in, elements_at_once):
    monkeypatch.setattr("ebb._optimizer._ELEMENTS_AT_ONCE", elements_at_once)

    def new():
        model = new_half_model()
        home.manage(model, device_bytes=0, minimum_bytes=0)
        return model, ebb.AdamW(model.parameters(), lr=1e-3, update_in=update_in)

    model, optimizer = new()
    steps_of(model, optimizer)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    states = optimizer.state_dict()
    expected = steps_of(model, optimizer)
    for first in ("weights", "states"):
        model, optimizer = new()
        steps_of(model, optimizer)  # of another run
        for what in sorted(("weights", "states"), key=first.__ne__):
            model.load_state_dict(weights) if what == "weights" else optimizer.load_state_dict(states)
        assert_equal(steps_of(model, optimizer), expected)


@pytest.mark.parametrize("update_on", ["device", "cpu"])
def test_a_master_that_outlives_its_parameter_is_updated_as_in_step(home, update_on):
    found = []
    for update_in in ("step", "next_use"):
        weight = torch.linspace(0, 1, 64).bfloat16().requires_grad_()
        home.manage([weight], device_bytes=0, minimum_bytes=0)
        optimizer = ebb.AdamW([weight], update_in=update_in, update_on=update_on)
        for _ in range(3):
            weight.sin().float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        master = optimizer.state[weight]["master"]
        del optimizer, weight
        gc.collect()
        found.append(master.clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("update_in", ["step", "next_use"])
def test_a_state_that_options_ask_for_later_is_made_then(home, update_in):
    plain, model = new_model(), new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    optimizers = [
        torch.optim.SGD(plain.parameters(), lr=1e-2, foreach=False),
        ebb.SGD(model.parameters(), lr=1e-2, update_in=update_in),
    ]
    for trained, optimizer in zip((plain, model), optimizers, strict=True):
        steps_of(trained, optimizer)
        optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
    assert_equal(steps_of(model, optimizers[1]), steps_of(plain, optimizers[0]))


def steps_of(model, optimizer):
    for step in range(6):
        torch.manual_seed(step)
        tokens = torch.randint(0, 32, (4, 8))
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("make", [new_model, new_half_model])
@pytest.mark.parametrize("managed", [False, True])
def test_an_update_in_backward_is_the_update_in_step(home, kind, make, managed):
    plain, model = make(), make()
    expected = steps_of(plain, getattr(ebb, kind)(plain.parameters(), lr=1e-2))
    if managed:
        home.manage(model, device_bytes=0, minimum_bytes=0)
    optimizer = getattr(ebb, kind)(model.parameters(), lr=1e-2, update_in="backward")
    assert_equal(steps_of(model, optimizer), expected)
    model(torch.arange(8)).sum().backward()
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize(("kind", "options"), [each for each in OPTIONS if "maximize" not in each[1]])
@pytest.mark.parametrize("make", [new_model, new_half_model])
@pytest.mark.parametrize("update_in", ["step", "backward", "next_use"])
def test_updates_on_the_cpu_have_the_same_bits_for_managed_parameters(home, kind, options, make, update_in):
    plain, model = make(), make()
    expected = steps_of(plain, getattr(ebb, kind)(plain.parameters(), lr=1e-2, update_on="cpu", **options))
    home.manage(model, device_bytes=0, minimum_bytes=0)
    optimizer = getattr(ebb, kind)(model.parameters(), lr=1e-2, update_in=update_in, update_on="cpu", **options)
    assert_equal(steps_of(model, optimizer), expected)


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
def test_updates_on_the_cpu_are_close_to_the_devices(kind):
    plain, model = new_model(), new_model()
    expected = steps_of(plain, getattr(ebb, kind)(plain.parameters(), lr=1e-2))
    found = steps_of(model, getattr(ebb, kind)(model.parameters(), lr=torch.tensor(1e-2), update_on="cpu"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if kind != "SGD":  # whose fused kernel rounds as its operations do
        assert not all(map(torch.equal, found, expected))


def test_the_cpu_does_not_maximize():
    model = new_model()
    with pytest.raises(ValueError, match="does not maximize"):
        ebb.SGD(model.parameters(), maximize=True, update_on="cpu")
    with pytest.raises(ValueError, match='must be "device" or "cpu"'):
        ebb.SGD(model.parameters(), update_on="gpu")
    optimizer = ebb.SGD(model.parameters(), update_on="cpu")
    optimizer.load_state_dict(ebb.SGD(model.parameters(), maximize=True).state_dict())
    model(torch.arange(8)).sum().backward()
    with pytest.raises(ValueError, match="does not maximize"):
        optimizer.step()


def test_an_optimizer_of_another_name_updates_on_the_cpu():
    class Mine(ebb.Adam):
        pass

    plain, model = new_model(), new_model()
    expected = steps_of(plain, ebb.Adam(plain.parameters(), update_on="cpu"))
    assert_equal(steps_of(model, Mine(model.parameters(), update_on="cpu")), expected)


def test_updates_in_backward_refuse_to_accumulate_and_lose_nothing():
    model = new_model()
    optimizer = ebb.AdamW(model.parameters(), update_in="backward")
    model(torch.arange(8)).sum().backward()
    updated = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(RuntimeError, match="second gradient before step"):
        model(torch.arange(8)).sum().backward()
    assert_equal([each.detach() for each in model.parameters()], updated)
    assert any(each.grad is not None for each in model.parameters())
    for ends in (optimizer.zero_grad, optimizer.step):
        ends()
        model(torch.arange(8)).sum().backward()


@pytest.mark.parametrize(
    "options",
    [{"lr": "1e-3"}, {"lr": torch.ones(2)}, {"lr": None}, {"betas": 0.9}, {"betas": (0.9,)}, {"betas": ("a", 0.9)}, {"eps": True}]
)
def test_options_of_other_types_are_value_errors(options):
    with pytest.raises(ValueError, match="ebb: AdamW got"):
        ebb.AdamW([torch.ones(1, requires_grad=True)], **options)


@pytest.mark.parametrize("make", [new_model, new_half_model])
@pytest.mark.parametrize("how", [{}, {"device_bytes": "8KiB"}, {"resident_bytes": "8KiB"}, {"states": False}])
@pytest.mark.parametrize("elements_at_once", [1 << 24, 40])
def test_an_update_at_the_next_use_is_the_update_in_step(monkeypatch, home, make, how, elements_at_once):
    monkeypatch.setattr("ebb._optimizer._ELEMENTS_AT_ONCE", elements_at_once)
    plain, model = make(), make()
    expected = train(plain, ebb.AdamW(plain.parameters(), lr=1e-2), home)
    home.manage(model, **({"device_bytes": 0, "minimum_bytes": 0} | how))
    optimizer = ebb.AdamW(model.parameters(), lr=1e-2, update_in="next_use")
    assert_equal(train(model, optimizer, home), expected)


def stepped(home, **options):
    """A managed weight and its optimizer after two steps: with "next_use", the second update is yet to come."""
    weight = (torch.arange(256.0).view(16, 16) / 256).requires_grad_()
    home.manage(weight, device_bytes=0, minimum_bytes=0)
    optimizer = ebb.AdamW([weight], **options)
    for factor in (1, 2):
        optimizer.zero_grad()
        (weight * factor).sin().sum().backward()
        optimizer.step()
    return weight, optimizer


PROGRAMS = {
    "reads": lambda weight, optimizer: None,
    "writes its gradient": lambda weight, optimizer: weight.grad.mul_(100),
    "sets its gradient to zero": lambda weight, optimizer: optimizer.zero_grad(set_to_none=False),
    "lets go of its gradient": lambda weight, optimizer: optimizer.zero_grad(),
    "accumulates": lambda weight, optimizer: (weight * 3).sin().sum().backward(),
    "steps once more": lambda weight, optimizer: optimizer.step(),
    "changes an option": lambda weight, optimizer: optimizer.param_groups[0].update(lr=7.0),
    "writes the weight": lambda weight, optimizer: weight.data.mul_(2),
    "gives the weight other data": lambda weight, optimizer: setattr(weight, "data", torch.ones(16, 16)),
    "saves and loads": lambda weight, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "ends the optimizer": lambda weight, optimizer: optimizer.state.clear(),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_program_tells_an_update_at_the_next_use_from_one_in_step(home, program):
    seen = []
    for update_in in ("step", "next_use"):
        weight, optimizer = stepped(home, lr=0.1, update_in=update_in)
        PROGRAMS[program](weight, optimizer)
        seen.append(weight.detach().clone())
        (weight * 2).sin().sum().backward()
        optimizer.step()
        seen.append(weight.detach().clone())
    assert_equal(seen[2:], seen[:2])


def test_an_update_that_nobody_can_see_any_more_is_dropped(home):
    weight, optimizer = stepped(home, update_in="next_use")
    assert home.stats().managed.tensors == 4
    del weight, optimizer
    gc.collect()
    assert home.stats().managed.tensors == 0


def test_models_that_end_with_an_update_to_come_leave_nothing(home):
    for _ in range(200):
        stepped(home, update_in="next_use")
    assert home.stats().pool.peak_bytes < 200 * 4 * 4096 / 2  # of a page for each weight, gradient and state


def test_an_update_at_the_next_use_has_the_options_of_its_step(home):
    seen = []
    for update_in in ("step", "next_use"):
        rate, betas = torch.tensor(0.1), [0.9, 0.99]
        weight, _optimizer = stepped(home, lr=rate, betas=betas, update_in=update_in)
        rate.fill_(7.0)
        betas[0] = 0.1
        seen.append(weight.detach().clone())
    assert_equal(seen[1:], seen[:1])


def test_steps_of_old_checkpoints_are_numbers(home):
    weight = torch.ones(4, 4, requires_grad=True)
    optimizer = ebb.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    states = optimizer.state_dict()
    states["state"][0]["step"] = 1
    optimizer.load_state_dict(states)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 2


@pytest.mark.parametrize("update_on", ["device", "cpu"])  # homes are files, in which the CPU does not compute
def test_an_error_in_an_update_reaches_the_use(home, update_on):
    weight, optimizer = stepped(home, update_in="next_use", update_on=update_on)
    of_other_sizes = torch.zeros(3)
    home.manage([of_other_sizes], device_bytes=0, minimum_bytes=0)
    optimizer.state[weight]["exp_avg"] = of_other_sizes
    optimizer.step()
    with pytest.raises(RuntimeError, match="other sizes"):
        weight.sum()
    weight.sum()


def test_states_are_managed_beside_their_parameters(home):
    model = new_half_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    bytes_of_weights = sum(each.nbytes for each in model.parameters())
    assert home.stats().managed.bytes == bytes_of_weights
    steps_of(model, ebb.AdamW(model.parameters(), update_in="backward"))
    gc.collect()
    # No gradient is left, and no optimizer.
    assert home.stats().managed.bytes == bytes_of_weights
    optimizer = ebb.AdamW(model.parameters(), update_in="backward")
    steps_of(model, optimizer)
    assert home.stats().managed.bytes == 7 * bytes_of_weights  # master and two moments in float32


@pytest.mark.parametrize("make", [new_model, new_half_model])
@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize("elements_at_once", [1 << 24, 40])
def test_training_goes_on_from_a_checkpoint(monkeypatch, home, tmp_path, make, managed, elements_at_once):
    monkeypatch.setattr("ebb._optimizer._ELEMENTS_AT_ONCE", elements_at_once)
    plain = make()
    optimizer = ebb.AdamW(plain.parameters(), lr=1e-2)
    train(plain, optimizer, contextlib.nullcontext())
    expected = train(plain, optimizer, contextlib.nullcontext(), first=10)

    def new():
        model = make()
        if managed:
            home.manage(model, device_bytes=0, minimum_bytes=0)
        return model, ebb.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = new()
    train(model, optimizer, home)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    torch.save((weights, optimizer.state_dict()), tmp_path / "checkpoint.pt")

    model, optimizer = new()
    weights, states = torch.load(tmp_path / "checkpoint.pt")
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    assert_equal(train(model, optimizer, home, first=10), expected)


@pytest.mark.parametrize("make", [new_model, new_half_model])
@pytest.mark.parametrize("where", ["disk", "host"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"device_bytes": "4KiB", "resident_bytes": "8KiB"},
        {"weights": False, "gradients": False},
        {"states": False},
    ],
)
def test_a_training_that_is_saved_on_the_way_ends_with_the_states_of_a_resident_one(make, where, how):
    home = ebb.Offloader(device="cpu", policy=ebb.policies.minimum_size(1), home=where)
    plain = make()
    optimizer = ebb.AdamW(plain.parameters(), lr=1e-2)
    train(plain, optimizer, contextlib.nullcontext())
    expected = train(plain, optimizer, contextlib.nullcontext(), first=10)
    expected_states = optimizer.state_dict()["state"]

    def new():
        model = make()
        home.manage(model, **({"device_bytes": 0, "minimum_bytes": 0} | how))
        return model, ebb.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = new()
    train(model, optimizer, home)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    states = optimizer.state_dict()
    model, optimizer = new()
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    assert_equal(train(model, optimizer, home, first=10), expected)
    found = optimizer.state_dict()["state"]
    assert found.keys() == expected_states.keys()
    for number, state in expected_states.items():
        assert_equal(list(found[number].values()), list(state.values()))
    if not how.get("weights", True):
        next(model.parameters()).data_ptr()  # has never left


def test_the_optimizer_and_the_model_end():
    model = new_model()
    optimizer = ebb.AdamW(model.parameters(), update_in="backward")
    steps_of(model, optimizer)
    ended = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ended() is None
    model(torch.arange(8)).sum().backward()
    assert model[1].weight.grad is not None  # nobody updates any more
    weight = weakref.ref(model[1].weight)
    del model
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("managed", [False, True])
def test_a_state_dict_is_a_copy_and_is_copied(home, managed):
    def new():
        model = new_half_model()
        if managed:
            home.manage(model, device_bytes=0, minimum_bytes=0)
        return model, ebb.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = new()
    steps_of(model, optimizer)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    states = optimizer.state_dict()
    expected = steps_of(model, optimizer)
    for _ in range(2):
        model, optimizer = new()
        model.load_state_dict(weights)
        optimizer.load_state_dict(states)
        assert_equal(steps_of(model, optimizer), expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_states_of_torchs_sgd_are_taken(momentum):
    plain, model = new_model(), new_model()
    torchs = torch.optim.SGD(plain.parameters(), lr=1e-2, momentum=momentum, foreach=False)
    steps_of(plain, torchs)
    model.load_state_dict(plain.state_dict())
    optimizer = ebb.SGD(model.parameters(), lr=7.0)
    optimizer.load_state_dict(torchs.state_dict())
    assert_equal(steps_of(model, optimizer), steps_of(plain, torchs))


def test_a_state_dict_that_does_not_fit_changes_nothing(home):
    model = new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    optimizer = ebb.AdamW(model.parameters(), lr=1e-2)
    steps_of(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    for wrong in (torch.ones(3), "text"):
        states = copy.deepcopy(before)
        states["state"][2]["exp_avg"] = wrong
        states["state"][0]["exp_avg"].fill_(7.0)
        with pytest.raises(ValueError, match="ebb: exp_avg of parameter 2 is"):
            optimizer.load_state_dict(states)
        found = optimizer.state_dict()
        assert found["state"].keys() == before["state"].keys()
        for number, state in before["state"].items():
            assert_equal(list(found["state"][number].values()), list(state.values()))


def test_a_parameter_without_a_state_has_none_after_loading():
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    optimizer = ebb.AdamW(weights)
    weights[0].sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert weights[0] in optimizer.state and weights[1] not in optimizer.state


def test_states_of_torchs_optimizer_are_taken():
    plain = new_half_model()
    torchs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    steps_of(plain, torchs)
    optimizer = ebb.AdamW(plain.parameters(), lr=1e-2)
    optimizer.load_state_dict(torchs.state_dict())
    steps_of(plain, optimizer)
    state = optimizer.state[plain[1].weight]
    assert {state[name].dtype for name in ("master", "exp_avg", "exp_avg_sq")} == {torch.float32}
    assert state["step"] == 12
    assert torch.equal(state["master"].bfloat16(), plain[1].weight)


def test_copies_of_an_optimizer():
    model = new_model()
    optimizer = ebb.AdamW(model.parameters(), lr=1e-2)
    steps_of(model, optimizer)
    both = copy.deepcopy((model, optimizer))
    assert_equal(steps_of(*both), steps_of(model, optimizer))
    both[1].add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(ebb.AdamW(model.parameters(), update_in="backward"))


def test_a_copy_of_an_optimizer_updates_on_the_cpu_as_well():
    plain, model = new_model(), new_model()
    expected = steps_of(plain, ebb.AdamW(plain.parameters(), update_on="cpu"))
    parameters = list(model.parameters())
    copied = copy.copy(ebb.AdamW(parameters, update_on="cpu"))
    assert_equal(steps_of(model, copied), expected)


@pytest.mark.parametrize("copied_by", [copy.copy, copy.deepcopy])
def test_a_copy_of_an_optimizer_has_its_options(home, copied_by):
    model = new_model()
    optimizer = copied_by(ebb.AdamW(model.parameters(), update_in="next_use", update_on="cpu"))
    assert (optimizer._update_in, optimizer._update_on) == ("next_use", "cpu")


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
def test_complex_parameters_have_the_bits_of_torch_on_the_cpu_too(kind):
    found = []
    for make in (getattr(torch.optim, kind), partial(getattr(ebb, kind), update_on="cpu")):
        weight = torch.linspace(0, 1, 4).to(torch.complex64).requires_grad_()
        optimizer = make([weight], lr=0.1)
        for _ in range(3):
            weight.grad = torch.full((4,), 1j)
            optimizer.step()
        found.append(weight.detach())
    assert torch.equal(*found)


def test_a_graph_from_before_an_update_on_the_cpu_is_refused():
    weight = torch.nn.Parameter(torch.randn(100))
    optimizer = ebb.AdamW([weight], lr=0.1, update_on="cpu")
    weight.sin().sum().backward()
    before = (weight * weight).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()


def test_a_first_step_in_inference_mode_is_a_step_as_any_other(home):
    found = []
    for update_in in ("step", "next_use"):
        weight = torch.ones(8).requires_grad_()
        home.manage([weight], device_bytes=0, minimum_bytes=0)
        optimizer = ebb.AdamW([weight], lr=0.1, update_in=update_in)
        for _ in range(3):
            (weight * 2).sin().sum().backward()
            with torch.inference_mode():
                optimizer.step()
            optimizer.zero_grad()
        found.append(weight.detach().clone())
    assert torch.equal(*found)


def test_a_state_that_outlives_its_parameter_is_an_error_where_it_takes_the_parameters_values(home):
    weight = torch.ones(8).requires_grad_()
    home.manage([weight], device_bytes=0, minimum_bytes=0)
    optimizer = ebb.Adam([weight], weight_decay=0.5, update_in="next_use")
    for _ in range(3):
        weight.sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moment = optimizer.state[weight]["exp_avg"]
    del optimizer, weight
    gc.collect()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="parameter has ended"):
            moment.clone()


def test_a_state_from_before_a_scheduler_is_taken():
    model = new_model()
    known = ebb.AdamW(model.parameters()).state_dict()
    optimizer = ebb.AdamW([{"params": list(model.parameters()), "name": "all"}])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.load_state_dict(known)


def test_another_optimizers_state_is_one_clear_error():
    model = new_model()
    known = ebb.SGD(model.parameters()).state_dict()
    with pytest.raises(ValueError, match="no state of AdamW"):
        ebb.AdamW(model.parameters()).load_state_dict(known)


def test_numpys_numbers_are_options():
    numpy = pytest.importorskip("numpy")
    assert ebb.AdamW([torch.ones(2).requires_grad_()], lr=numpy.float32(0.5)).param_groups[0]["lr"] == 0.5
    with pytest.raises(ValueError, match="dampening"):
        ebb.SGD([torch.ones(2).requires_grad_()], dampening="much")


def test_a_closure_is_called_with_gradients():
    model = new_model()
    optimizer = ebb.AdamW(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.arange(8)).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"eps": float("nan")},
        {"betas": (0.9, 1.0)},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, 2)},
        {"betas": (-0.1, 0.9)},
        {"weight_decay": -1},
        {"update_in": "epoch"},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="ebb"):
        ebb.AdamW(new_model().parameters(), **options)


@pytest.mark.parametrize("options", [{"momentum": -1}, {"nesterov": True}, {"momentum": 0.9, "dampening": 0.1, "nesterov": True}])
def test_options_of_sgd_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="ebb: SGD"):
        ebb.SGD(new_model().parameters(), **options)


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(8, 4, sparse=True)
    embedding(torch.arange(3)).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        ebb.AdamW(embedding.parameters()).step()


@pytest.mark.parametrize("make", [new_model, new_half_model])
@pytest.mark.parametrize(
    ("kind", "options", "of_parameters_size"),
    [(ebb.AdamW, {"amsgrad": True}, "exp_avg"), (ebb.SGD, {"momentum": 0.9}, "momentum_buffer"), (ebb.SGD, {}, None)],
)
def test_an_update_in_parts_is_the_update_at_once(monkeypatch, home, make, kind, options, of_parameters_size):
    expected_model, model = make(), make()
    expected = train(expected_model, kind(expected_model.parameters(), lr=1e-2, **options), home)
    monkeypatch.setattr("ebb._optimizer._ELEMENTS_AT_ONCE", 40)
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    assert_equal(train(model, optimizer, home), expected)
    states = optimizer.state_dict()["state"].values()
    steps = {int(state["step"]) for state in states}
    assert len(steps) == 1 and steps.pop() > 0
    if of_parameters_size is not None:
        assert [state[of_parameters_size].shape for state in states] == [each.shape for each in model.parameters()]
    assert any("parts" in state for state in optimizer.state.values())


def test_a_checkpoint_without_states_goes_on_in_parts(monkeypatch):
    plain, parameter = torch.ones(8, 4, requires_grad=True), torch.ones(8, 4, requires_grad=True)
    theirs = torch.optim.SGD([plain], lr=0.1)
    plain.grad, parameter.grad = torch.ones(8, 4), torch.ones(8, 4)
    theirs.step()
    monkeypatch.setattr("ebb._optimizer._ELEMENTS_AT_ONCE", 4)
    ours = ebb.SGD([parameter], lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    ours.step()
    assert torch.equal(parameter, plain)


class RowsAreCopies(torch.Tensor):
    """As a DTensor's rows are."""

    def __getitem__(self, rows):
        return super().__getitem__(rows) if rows is ... else super().__getitem__(rows).clone()


def test_a_tensor_whose_rows_are_copies_is_updated_whole(monkeypatch):
    monkeypatch.setattr("ebb._optimizer._ELEMENTS_AT_ONCE", 4)
    updated = []
    for kind in (torch.Tensor, RowsAreCopies):
        parameter = torch.ones(8, 4).as_subclass(kind).requires_grad_()
        parameter.grad = torch.ones(8, 4).as_subclass(kind)
        ebb.AdamW([parameter], lr=0.1).step()
        updated.append(parameter.detach().as_subclass(torch.Tensor))
    assert not torch.equal(updated[0], torch.ones(8, 4))
    assert_equal(updated[1:], updated[:1])


def test_what_is_to_stay_on_the_device_stays(home):
    plain, model = new_model(), new_model()
    expected = train(plain, ebb.AdamW(plain.parameters(), lr=1e-2), home)
    home.manage(model, device_bytes=0, minimum_bytes=0, resident_bytes="8KiB")
    assert_equal(train(model, ebb.AdamW(model.parameters(), lr=1e-2), home), expected)
    stats = home.stats()
    assert 0 < stats.managed_resident.now_bytes <= 8192 == stats.managed_resident.capacity_bytes
    assert stats.managed.bytes > 0
    next(model.parameters()).data_ptr()  # a resident tensor's memory does not go


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
def test_a_checkpoint_that_is_older_than_an_option_is_taken(kind):
    model = new_model()
    optimizer = getattr(ebb, kind)(model.parameters(), maximize=True)
    known = getattr(torch.optim, kind)(new_model().parameters(), maximize=True).state_dict()
    del known["param_groups"][0]["maximize"]
    optimizer.load_state_dict(known)
    assert optimizer.param_groups[0]["maximize"] is False
    assert "maximize" not in known["param_groups"][0]


def test_states_of_the_programs_own_are_kept(tmp_path):
    model = new_model()
    optimizer = ebb.AdamW(model.parameters())
    steps_of(model, optimizer)
    optimizer.state["mine"] = 1
    known = optimizer.state_dict()
    assert known["state"]["mine"] == 1
    ebb.save(optimizer, tmp_path / "optimizer.pt")
    assert torch.load(tmp_path / "optimizer.pt")["state"]["mine"] == 1
    again = ebb.AdamW(new_model().parameters())
    again.load_state_dict(known)
    assert again.state["mine"] == 1
    steps_of(model, again)


def test_hooks_of_a_state_dict_see_whole_states_and_may_replace_them():
    model = new_model()
    optimizer = ebb.AdamW(model.parameters(), lr=1e-2)
    steps_of(model, optimizer)
    seen = []

    def first_moments(known):
        return [state["exp_avg"] for state in known["state"].values()]

    def negate(optimizer, known):
        seen.append(len(first_moments(known)))
        state = {key: each | {"exp_avg": -each["exp_avg"]} for key, each in known["state"].items()}
        return known | {"state": state}

    optimizer.register_state_dict_pre_hook(lambda optimizer: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(negate)
    known = optimizer.state_dict()
    loaded = ebb.AdamW(new_model().parameters(), lr=7.0)
    loaded.register_load_state_dict_pre_hook(negate)
    loaded.register_load_state_dict_post_hook(lambda optimizer: seen.append(optimizer.param_groups[0]["lr"]))
    loaded.register_load_state_dict_post_hook(lambda optimizer: seen.append(len(first_moments(optimizer.state_dict()))))
    loaded.load_state_dict(known)
    count = len(known["state"])
    assert seen == ["before saving", count, count, 1e-2, count]
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert_equal(first_moments(known), [-each for each in moments])
    assert_equal(first_moments(loaded.state_dict()), moments)


@pytest.mark.parametrize("loaded", [False, True])
def test_a_state_in_parts_is_read_by_its_name(monkeypatch, home, loaded):
    monkeypatch.setattr("ebb._optimizer._ELEMENTS_AT_ONCE", 40)
    model = new_model()
    home.manage(model, device_bytes=0, minimum_bytes=0)
    optimizer = ebb.AdamW(model.parameters())
    steps_of(model, optimizer)
    known = optimizer.state_dict()
    if loaded:
        optimizer.load_state_dict(known)
    state = optimizer.state[model[1].weight]
    assert len(state["parts"]) > 1
    assert torch.equal(state["exp_avg"], known["state"][1]["exp_avg"])
    with pytest.raises(RuntimeError, match="clone"):  # it would be lost
        state["exp_avg"].zero_()
    with pytest.raises(KeyError, match="max_exp_avg_sq"):
        state["max_exp_avg_sq"]


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD"])
def test_states_are_loaded_any_number_of_times_and_into_copies(kind):
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = getattr(ebb, kind)([weight], lr=0.1)

    def step():
        weight.grad = torch.ones(4)
        optimizer.step()

    step()
    known = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        step()
        optimizer.load_state_dict(known)
    copy.deepcopy(optimizer).load_state_dict(known)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]})
    assert optimizer.param_groups[0].keys() == optimizer.param_groups[1].keys()
