import threading

import pytest
import torch

import ebb
from conftest import assert_same, data, gradients, new_model
from ebb import policies


def step(guard):
    model = new_model()
    with guard:
        loss = model(data()).square().mean()
    loss.backward()
    return [loss, *gradients(model)]


@pytest.mark.parametrize(
    "policy",
    [
        policies.offload_everything(),
        policies.minimum_size(256),
        policies.minimum_size("1KiB"),
        policies.except_operations(["TanhBackward0"]),
        policies.only_operations({"GeluBackward0", "TanhBackward0"}),
        policies.recompute(),
        policies.recompute(ebb.Recompute.COMPUTE_BOUND),
        policies.minimum_size(256, policies.except_operations(("TanhBackward0",), policies.recompute())),
        policies.callback(lambda candidate: candidate.ordinal % 2 == 0),
        lambda candidate: candidate.bytes > 1024,
        lambda candidate: ebb.Decision.OFFLOAD,
        policies.callback(lambda candidate: candidate.recompute == ebb.Recompute.NO, policies.recompute()),
        policies.callback(
            lambda candidate: ebb.Decision.OFFLOAD if candidate.ordinal % 2 else ebb.Decision.RECOMPUTE,
            policies.recompute(),
        ),
    ],
)
def test_every_policy_gives_the_gradients_of_plain_autograd(policy):
    assert_same(step, ebb.Offloader("cpu", policy))


@pytest.mark.parametrize("policy", [policies.keep_everything(0), lambda candidate: False, lambda c: ebb.Decision.KEEP])
def test_a_policy_that_keeps_moves_nothing(policy):
    offloader = ebb.Offloader("cpu", policy)
    assert_same(step, offloader, moves=False)
    assert offloader.stats().kept["policy"].tensors > 0


def test_a_function_is_told_bytes_operation_and_ordinal():
    seen = []
    offloader = ebb.Offloader("cpu", lambda candidate: seen.append(candidate) or True)
    leaf = torch.ones(100, requires_grad=True)
    with offloader:
        leaf.mul(2).exp().sin().sum().backward()
    assert [each.ordinal for each in seen] == list(range(len(seen)))
    assert [each.bytes for each in seen] == [400] * len(seen)
    assert "ExpBackward0" in [each.operation for each in seen]
    assert all(each.recompute == ebb.Recompute.NO for each in seen)
    assert repr(seen[0]).startswith("Candidate(bytes=400, ordinal=0")


def test_recompute_computes_again_and_moves_less():
    offloader = ebb.Offloader("cpu", policies.recompute())
    weight = torch.ones(64, 64, requires_grad=True)
    for dropped in (0, 1):  # the first step proves that the bytes can be made again
        with offloader:
            x = torch.nn.functional.silu(weight @ weight)
            loss = (x * x).sum()
        del x  # what the program has is not computed again
        loss.backward()
        assert offloader.stats().dropped.tensors == dropped
        assert offloader.stats().recomputed.tensors == dropped


class Refused(Exception):
    pass


def test_what_a_policy_raises_reaches_the_forward_pass_as_it_is():
    error = Refused("not this one")

    def refuse(candidate):
        raise error

    leaf = torch.ones(100, requires_grad=True)
    with ebb.Offloader("cpu", refuse):
        with pytest.raises(Refused) as caught:
            leaf.exp()
    assert caught.value is error
    assert caught.traceback[-1].name == "refuse"


def test_after_a_policy_has_raised_the_next_step_is_exact():
    calls = []

    def refuse_the_third(candidate):
        calls.append(candidate)
        if len(calls) == 3:
            raise Refused

    offloader = ebb.Offloader("cpu", lambda candidate: refuse_the_third(candidate) is None)
    with pytest.raises(Refused):
        step(offloader)
    assert_same(step, offloader)


@pytest.mark.parametrize("answer", [None, 1, "yes"])
def test_a_policy_that_returns_something_else_is_a_type_error(answer):
    leaf = torch.ones(100, requires_grad=True)
    with ebb.Offloader("cpu", lambda candidate: answer):
        with pytest.raises(TypeError, match="must return True"):
            leaf.exp()


def test_a_policy_of_another_type_is_a_type_error():
    with pytest.raises(TypeError, match="policy"):
        ebb.Offloader("cpu", policy="everything")
    with pytest.raises(TypeError, match="names"):
        policies.except_operations("SiluBackward0")
    with pytest.raises(TypeError, match="callback"):
        policies.callback(3)


def test_a_function_is_never_called_from_two_threads_at_once():
    inside = []
    overlaps = []

    def slow(candidate):
        inside.append(1)
        overlaps.append(len(inside))
        for _ in range(2000):
            pass
        inside.pop()
        return True

    offloader = ebb.Offloader("cpu", slow)
    threads = [threading.Thread(target=lambda: [step(offloader) for _ in range(5)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(overlaps) == 1


def test_a_function_goes_with_its_offloader():
    import gc
    import weakref

    class Function:
        def __call__(self, candidate):
            return True

    function = Function()
    gone = weakref.ref(function)
    offloader = ebb.Offloader("cpu", function)
    del function
    leaf = torch.ones(100, requires_grad=True)
    with offloader:
        loss = leaf.exp().sum()
    del offloader
    assert gone() is not None  # the graph has it
    loss.backward()
    del loss
    gc.collect()
    assert gone() is None


def test_a_policy_that_saves_under_its_own_guard_gets_an_error():
    weight = torch.ones(4, requires_grad=True)

    def saves(candidate):
        with torch.enable_grad():
            weight.exp()
        return True

    offloader = ebb.Offloader("cpu", saves)
    x = torch.ones(256, requires_grad=True)
    with offloader, pytest.raises(RuntimeError, match="under the guard of the offloader that asked the policy"):
        x.exp()
