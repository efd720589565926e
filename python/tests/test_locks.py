"""Nothing waits for the interpreter's lock while it holds what a thread with that lock wants. Each program has a watchdog."""

import pytest

from conftest import run_python

HEAD = """
import gc, sys, threading, torch, ebb
torch.set_num_threads(1)
sys.setswitchinterval(1e-5)

class Twice(torch.autograd.Function):      # packs and unpacks with the interpreter's lock held
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.save_for_backward(x * 1, y)
        return y
    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.saved_tensors
        assert torch.equal(a * 2, b)
        return gradient * 2

def slow(candidate):                        # gives the lock away many times while it decides
    return sum(i for i in range(200)) > 0

def step(offloader, function=Twice.apply):
    x = torch.ones(20_000, requires_grad=True)
    with offloader:
        y = x
        for _ in range(6):
            y = function(y).sin()
        loss = y.sum()
    loss.backward()

errors = []
def together(*functions):
    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=guarded, args=(each,)) for each in functions]
    [each.start() for each in threads]
    [each.join() for each in threads]
    assert not errors, errors
    print("done")
"""


def run(program):
    assert run_python(HEAD + program, timeout=90).splitlines()[-1] == "done"


def test_a_policy_of_pythons_and_two_threads():
    run(
        """
offloader = ebb.Offloader("cpu", slow)
train = lambda: [step(offloader) for _ in range(40)]
together(train, train)
"""
    )


def test_a_policy_of_pythons_two_threads_and_eviction_at_once():
    run(
        """
offloader = ebb.Offloader("cpu", lambda candidate: slow(candidate) and candidate.ordinal % 2 == 0)
over = threading.Event()
def train():
    for _ in range(40):
        step(offloader)
def evict():
    while not over.is_set():
        offloader.evict("1GB")
        offloader.stats(); offloader.explain(); offloader.drain(); gc.collect()
        over.wait(0.005)                    # a collection holds the lock for 50 ms, and the others are to go on
evicting = threading.Thread(target=evict)
evicting.start()
try:
    together(train, train)
finally:
    over.set()
    evicting.join()
assert offloader.stats().evicted.tensors > 0
print("done")
"""
    )


def test_checkpointed_functions_of_pythons_and_two_threads_over_one_graph():
    run(
        """
offloader = ebb.Offloader("cpu", slow)
def function(y):
    for _ in range(50):
        pass
    return Twice.apply(y.sin())  # whose unpack is the first, with the lock held
def train():
    for _ in range(20):
        step(offloader, lambda y: ebb.checkpoint(function, y))
def share():
    for _ in range(20):
        x = torch.ones(20_000, requires_grad=True)
        with offloader:
            loss = ebb.checkpoint(function, ebb.checkpoint(function, x)).sum()
        derive = lambda: torch.autograd.grad(loss, x, retain_graph=True)
        threads = [threading.Thread(target=derive) for _ in range(2)]
        [each.start() for each in threads]
        [each.join() for each in threads]
together(train, share)
"""
    )


def test_offloaders_that_end_while_their_policy_is_asked():
    run(
        """
def train():
    for _ in range(40):
        step(ebb.Offloader("cpu", slow))
together(train, train)
"""
    )


def test_recomputed_storages_and_two_threads_over_one_graph():
    run(
        """
policy = ebb.policies.callback(lambda c: ebb.Decision.RECOMPUTE if slow(c) and c.recompute != ebb.Recompute.NO else True,
                               ebb.policies.recompute(ebb.Recompute.COMPUTE_BOUND))
offloader = ebb.Offloader("cpu", policy)
def share():
    for _ in range(30):
        x = torch.ones(100, 100, requires_grad=True)
        with offloader:
            y = torch.nn.functional.silu(Twice.apply(x) @ x)
            loss = (Twice.apply(y) * y * torch.nn.functional.silu(y)).sum()
        derive = lambda: torch.autograd.grad(loss, x, retain_graph=True)
        threads = [threading.Thread(target=derive) for _ in range(2)]
        [each.start() for each in threads]
        [each.join() for each in threads]
together(share, share)
assert offloader.stats().recomputed.tensors > 0
"""
    )


def test_graphs_that_own_python_objects_end_on_any_thread():
    run(
        """
class Owned:
    count = 0
    def __init__(self): Owned.count += 1
    def __del__(self): Owned.count -= 1
class Owns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.owned = Owned()
        ctx.save_for_backward(x * 1)
        return x.sin()
    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0].cos() * gradient
offloader = ebb.Offloader("cpu", slow)
def train():
    for i in range(30):
        x = torch.ones(20_000, requires_grad=True)
        with offloader:
            loss = ebb.checkpoint(Owns.apply, Owns.apply(x)).sum()
        if i % 3:
            loss.backward()
        del loss
together(train, train)
gc.collect()
assert Owned.count == 0, Owned.count
print("done")
"""
    )


@pytest.mark.parametrize("seconds", [1.0])
def test_a_policy_that_blocks_holds_up_no_other_python_thread(seconds):
    run(
        f"""
import time
inside = threading.Event()
def block(candidate):
    inside.set()
    time.sleep({seconds})
    return True
offloader = ebb.Offloader("cpu", block)
blocked = threading.Thread(target=lambda: Twice.apply(enter()))
def enter():
    offloader.__enter__()
    return torch.ones(10, requires_grad=True)
blocked.start()
inside.wait()
start = time.monotonic()
waits = threading.Thread(target=lambda: (offloader.__enter__(), Twice.apply(torch.ones(10, requires_grad=True))))
waits.start()                               # waits for the policy, and must have let go of the interpreter
time.sleep(0.05)
ticks = sum(1 for _ in range(1000))
assert time.monotonic() - start < {seconds} / 2
blocked.join(); waits.join()
print("done")
"""
    )
