import pytest
import torch

import ebb
from conftest import assert_same, data, gradients, new_model


def step(guard):
    model = new_model()
    with guard:
        loss = model(data()).square().mean()
    loss.backward()
    return [loss, *gradients(model)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stash_bytes": "64KiB"},
        {"window_bytes": "64KiB"},
        {"capacity_bytes": "1MiB"},
        {"disk_io": "threads"},
        {"return_freed_memory": False},
        {"record_timeline": True, "record_trace": True},
        {"host_memory_warning": 1.0},
    ],
    ids=str,
)
def test_every_option_gives_the_gradients_of_plain_autograd(options):
    assert_same(step, ebb.Offloader("cpu", ebb.policies.offload_everything(), **options))


def test_the_default_policy_keeps_what_is_below_one_mebibyte():
    offloader = ebb.Offloader("cpu")
    with offloader:
        small = torch.ones(1024, requires_grad=True).exp()
        large = torch.ones(1 << 18, requires_grad=True).exp()
    assert offloader.stats().kept["policy"].tensors == 1
    assert offloader.stats().offloaded.bytes == 1 << 20
    (small.sum() + large.sum()).backward()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"disk_io": "floppy"}, "disk_io"),
        ({"stash_bytes": 0}, "stash_bytes"),
        ({"host_memory": "virtual"}, "host_memory"),
        ({"host_memory_warning": 0.0}, "host_memory_warning"),
        ({"spill_folder": "/proc"}, "/proc"),
        ({"home": "tape"}, "home is 'tape'"),
        ({"device_budget": "1GB", "slowdown": 0.1}, "device_budget and slowdown"),
        ({"least_memory": True, "slowdown": 0.1}, "slowdown and least_memory"),
        ({"slowdown": -0.5}, "device_budget"),
        ({"device_budget": "1GB", "policy": ebb.policies.offload_everything()}, "policy"),
        ({"share_of_free": 0.5}, "share"),
    ],
    ids=str,
)
def test_options_that_cannot_be_used_are_errors_that_name_them(options, named):
    with pytest.raises((ValueError, RuntimeError), match=named):
        ebb.Offloader("cpu", **options)


def test_an_option_that_does_not_exist_is_a_type_error():
    with pytest.raises(TypeError, match="colour"):
        ebb.Offloader("cpu", colour="red")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_a_gpu_that_is_not_there_is_a_runtime_error_in_one_sentence():
    with pytest.raises(RuntimeError, match="no CUDA device") as caught:
        ebb.Offloader("cuda")
    assert "\n" not in str(caught.value)


def test_devices_have_names_and_are_objects():
    for device in ("cpu", torch.device("cpu"), torch.device("cpu", 0)):
        assert_same(step, ebb.Offloader(device, ebb.policies.offload_everything()))
    with pytest.raises(RuntimeError):
        ebb.Offloader("toaster")


def test_an_offloader_that_is_switched_off_moves_nothing():
    offloader = ebb.Offloader("cpu", ebb.policies.offload_everything(), enabled=False)
    assert_same(step, offloader, moves=False)
    assert offloader.stats().saved.tensors == 0
    assert "switched off" in offloader.summary()


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: ebb.Offloader(slowdown="2%"),
        lambda: ebb.Offloader(share_of_free="half"),
        lambda: ebb.Offloader(slowdown=True),
        lambda: ebb.Offloader(least_memory="yes"),
        lambda: ebb.Offloader(host_memory_warning="much"),
        lambda: ebb.Offloader(enabled="no"),
        lambda: ebb.Offloader(record_trace=1),
        lambda: ebb.Offloader(spill_folder="a\0b"),
        lambda: ebb.Offloader(spill_folder=3),
        lambda: ebb.policies.recompute("dear"),
        lambda: ebb.Offloader("cpu").manage(torch.nn.Linear(1, 1), device_bytes=0, weights="no"),
        lambda: ebb.Offloader("cpu").manage(torch.nn.Linear(1, 1), device_bytes=0, which="bias"),
        lambda: ebb.Offloader(policy=ebb.policies.minimum_size),
        lambda: ebb.Offloader().manage(None, device_bytes=0),
        lambda: ebb.wrap(torch.nn.Linear(1, 1), ebb.Offloader()),
        lambda: ebb.plot("memory.png", ebb.Offloader(record_timeline=True)),
    ],
)
def test_a_mistaken_argument_is_one_error_of_ebbs(mistake):
    with pytest.raises(TypeError, match="^ebb: "):
        mistake()


def test_a_choice_of_another_type_is_a_value_error():
    with pytest.raises(ValueError, match="home is"):
        ebb.Offloader(home=["host"])


def test_a_no_offload_that_ends_before_it_begins_is_one_clear_error():
    with pytest.raises(RuntimeError, match="has not begun"):
        ebb.no_offload().__exit__(None, None, None)
