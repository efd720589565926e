"""What only a GPU shows: copies on side streams, backward on the device's own thread, and a device that is full."""

import contextlib
import gc

import pytest
import torch

import ebb
from conftest import assert_same, gradients, run_python

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 1 << 20


def network(blocks: int = 8, width: int = 1024) -> torch.nn.Module:
    torch.manual_seed(5)
    layers = [layer for _ in range(blocks) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 8)).cuda()


def data(rows: int = 2048, width: int = 1024) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).cuda()


def step(guard):
    model = network()
    with guard:
        loss = model(data()).square().mean()
    loss.backward()
    return [loss, *gradients(model)]


@pytest.fixture
def on_gpu():
    """Moves whatever autograd saves, and must have none of it left when the test is over."""
    made = ebb.Offloader("cuda", ebb.policies.offload_everything())
    yield made
    gc.collect()
    torch.cuda.synchronize()
    stats = made.stats()
    assert stats.pool.now_bytes == 0
    assert stats.saved_on_device.now_bytes == 0


def test_the_device_is_the_gpu_where_there_is_one():
    offloader = ebb.Offloader(policy=ebb.policies.offload_everything())
    step(offloader)
    assert offloader.stats().offloaded.bytes > 16 * MIB


def test_gradients_are_exact(on_gpu):
    assert_same(step, on_gpu)


def test_forward_on_a_side_stream_is_exact(on_gpu):
    def on_a_stream(guard):
        model, x, stream = network(), data(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            with guard:
                loss = model(x).square().mean()
            loss.backward()
        torch.cuda.current_stream().wait_stream(stream)
        return [loss, *gradients(model)]

    assert_same(on_a_stream, on_gpu)


def test_a_custom_backward_that_records_a_side_stream_is_exact(on_gpu):
    side = torch.cuda.Stream()

    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 1)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            (saved,) = ctx.saved_tensors
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                out = gradient * saved
            saved.record_stream(side)
            gradient.record_stream(side)
            del saved, gradient
            taken = torch.full((2048, 1024), float("nan"), device="cuda")  # likely where the saved tensor was
            del taken
            torch.cuda.current_stream().wait_stream(side)
            out.record_stream(torch.cuda.current_stream())
            return out

    def late(guard):
        x = data().requires_grad_()
        with guard:
            y = x
            for _ in range(6):
                y = Late.apply(y.sin())
            loss = y.sum()
        loss.backward()
        return [x.grad]

    assert_same(late, on_gpu)


def test_checkpointed_regions_are_exact(on_gpu):
    def checkpointed(guard):
        model = network()
        with guard:
            x = data()
            for i in range(0, 16, 2):
                x = ebb.checkpoint(model[i : i + 2], x) if isinstance(guard, ebb.Offloader) else model[i : i + 2](x)
            loss = model[16](x).square().mean()
        loss.backward()
        return gradients(model)

    assert_same(checkpointed, on_gpu)


def test_automatic_mixed_precision_is_exact(on_gpu):
    def mixed(guard):
        model = network()
        with guard, torch.autocast("cuda", torch.bfloat16):
            loss = model(data()).square().mean()
        loss.backward()
        return gradients(model)

    assert_same(mixed, on_gpu)


def test_a_planned_step_is_within_its_budget_by_the_allocators_own_count():
    model, x = network(24), data(8192)

    def train(guard):
        with guard:
            loss = model(x).square().mean()
        loss.backward()

    def peak_of(steps, guard):
        for _ in range(steps):
            model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            train(guard)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    plain = peak_of(2, contextlib.nullcontext())
    expected = gradients(model)
    budget = int(0.6 * plain)
    offloader = ebb.Offloader("cuda", device_budget=budget)
    peak = peak_of(8, offloader)
    assert offloader.plan_report().metered
    assert peak <= budget < plain
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(model), strict=True))


def test_a_step_that_does_not_fit_evicts_what_was_kept_and_is_exact():
    assert run_python(
        """
import torch, ebb

def step(offloader=None):
    torch.manual_seed(1)
    x = torch.randn(64 << 20, device="cuda", requires_grad=True)      # 256 MiB, as is each save
    with offloader or torch.enable_grad():
        y = x
        for _ in range(12):
            y = y.sin()
        loss = y.sum()
    loss.backward()
    return x.grad.cpu()

expected = step()
torch.cuda.empty_cache()
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction((2 << 30) / total)
try:
    step()
except torch.OutOfMemoryError:
    print("plain autograd does not fit")
torch.cuda.empty_cache()
offloader = ebb.Offloader("cuda", ebb.policies.keep_everything())
assert torch.equal(step(offloader), expected)
print("evicted", offloader.stats().evicted.tensors > 0)
"""
    ).splitlines() == ["plain autograd does not fit", "evicted True"]


def test_what_does_not_fit_at_all_is_torchs_out_of_memory_error_and_evicts_nothing_in_vain():
    assert run_python(
        """
import torch, ebb

def step(offloader=None, asks=False):
    x = torch.arange(16 << 20, device="cuda", dtype=torch.float32).requires_grad_()      # 64 MiB
    with offloader or torch.enable_grad():
        y = x.sin().sin().sin()
        if asks:
            try:
                torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                print("out of memory")
        loss = y.exp().sum()
    loss.backward()
    return x.grad.cpu()

expected = step()
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction((1 << 30) / total)
torch.cuda.empty_cache()
offloader = ebb.Offloader("cuda", ebb.policies.keep_everything())
print(torch.equal(step(offloader, asks=True), expected))
print("evicted", offloader.stats().evicted.tensors)
"""
    ).splitlines() == ["out of memory", "True", "evicted 0"]


def test_a_policy_of_pythons_two_threads_and_a_full_device_at_once():
    assert (
        run_python(
            """
import sys, threading, torch, ebb
sys.setswitchinterval(1e-5)

def step(guard):
    x = torch.arange(16 << 20, device="cuda", dtype=torch.float32).requires_grad_()      # 64 MiB, as is each save
    with guard:
        y = x
        for _ in range(16):
            y = y.sin()
        loss = y.sum()
    loss.backward()
    return x.grad

expected = step(torch.enable_grad())
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction((1.5 * 2**30) / total)
torch.cuda.empty_cache()
offloader = ebb.Offloader("cuda", lambda candidate: sum(range(200)) > 0 and candidate.ordinal % 4 == 0)
errors = []

def train():
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                assert torch.equal(step(offloader), expected)
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=train) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not errors, errors
print("evicted", offloader.stats().evicted.tensors > 0)
"""
        ).splitlines()[-1]
        == "evicted True"
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_step_is_exact_and_holds_no_more_than_without_ebb(backend):
    """What is left after a compiled step's backward is the compiler's own: the workspace of cuBLAS and inductor's tuning."""
    printed = run_python(
        f"""
import contextlib, gc, sys, torch, ebb
torch.use_deterministic_algorithms(True)
torch.manual_seed(5)
model = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]).cuda()
x = torch.randn(4096, 1024, device="cuda")

def run(offloader):
    compiled = torch.compile(lambda x: model(x).square().mean(), backend="{backend}")
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with offloader or contextlib.nullcontext():
            loss = compiled(x)
        loss.backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    del loss
    gc.collect()
    torch.cuda.synchronize()
    return found

before = torch.cuda.memory_allocated()
plain = run(None)
held_by_plain = torch.cuda.memory_allocated() - before - sum(p.nbytes for p in plain)
torch._dynamo.reset()
offloader = ebb.Offloader("cuda", ebb.policies.offload_everything())
ours = run(offloader)
held = torch.cuda.memory_allocated() - before - 2 * sum(p.nbytes for p in plain)
print(all(torch.equal(a, b) for a, b in zip(plain, ours)))
print(held <= held_by_plain)
print(offloader.stats().offloaded.tensors > 0, offloader.stats().saved_on_device.now_bytes)
print("held without", held_by_plain, "with", held, file=sys.stderr)
""",
        timeout=240,
    )
    assert printed.splitlines()[-3:] == ["True", "True", "True 0"]


class Tied(torch.nn.Module):
    """Embedding and head share their weight."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(5)
        self.body = torch.nn.Sequential(
            torch.nn.Embedding(64, 128), torch.nn.Linear(128, 512), torch.nn.GELU(), torch.nn.Linear(512, 128)
        )
        self.head = torch.nn.Linear(128, 64, bias=False)
        self.head.weight = self.body[0].weight
        self.to("cuda", dtype)

    def forward(self, tokens):
        return self.head(self.body(tokens))


def train_tied(model, optimizer, guard, first, last):
    """Accumulates over two passes, clips, and has a schedule. Returns the losses."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (first + step))
    losses = []
    for step in range(first, last):
        for part in range(2):
            tokens = torch.randint(64, (256,), generator=torch.Generator().manual_seed(2 * step + part)).cuda()
            with guard:
                loss = torch.nn.functional.cross_entropy(model(tokens).float(), tokens)
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update_in", ["step", "next_use"])
@pytest.mark.parametrize("how", [{}, {"device_bytes": "600KiB"}, {"resident_bytes": "800KiB"}])
def test_managed_training_that_is_saved_on_the_way_has_the_bits_of_a_resident_one(tmp_path, dtype, update_in, how):
    plain = Tied(dtype)
    optimizer = ebb.AdamW(plain.parameters(), lr=1e-2)
    expected = train_tied(plain, optimizer, contextlib.nullcontext(), 0, 20)
    states = optimizer.state_dict()["state"]

    offloader = ebb.Offloader(policy=ebb.policies.minimum_size(1))
    found = []
    for first in (0, 10):
        model = Tied(dtype)
        offloader.manage(model, **({"device_bytes": 0, "minimum_bytes": 0} | how))
        managed = ebb.AdamW(model.parameters(), lr=1e-2, update_in=update_in)
        if first > 0:
            known = torch.load(tmp_path / "checkpoint.pt", mmap=True)
            model.load_state_dict(known["model"])
            managed.load_state_dict(known["optimizer"])
            for group in managed.param_groups:
                group["lr"] = group["initial_lr"]
        found += train_tied(model, managed, offloader, first, first + 10)
        ebb.save({"model": model.state_dict(), "optimizer": managed}, tmp_path / "checkpoint.pt")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b.detach().clone())
    of_managed = managed.state_dict()["state"]
    for number, state in states.items():
        for a, b in zip(state.values(), of_managed[number].values(), strict=True):
            assert torch.equal(torch.as_tensor(a).cpu(), torch.as_tensor(b).cpu())
    assert offloader.stats().managed_prefetched.bytes + offloader.stats().managed_fetched_late.bytes > 0


COLLECTIVE = """
import torch, ebb
import torch.distributed as dist

torch.cuda.set_device(0)
dist.init_process_group("nccl", rank=0, world_size=1, init_method="file://" + PATH)
home = ebb.Offloader("cuda", ebb.policies.minimum_size(1))
gathered, *others = (torch.zeros(1 << 20, device="cuda") for _ in range(7))
home.manage([gathered, *others], device_bytes=0, minimum_bytes=0)
sevens = torch.full((1 << 20,), 7.0, device="cuda")
large, part = (torch.zeros(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
torch.cuda.synchronize()

works = [dist.all_gather_into_tensor(large, part, async_op=True) for _ in range(40)]  # keep the group's stream busy
works.append(dist.all_gather_into_tensor(gathered, sevens, async_op=True))
for other in others:
    other.add_(1)  # which takes the room of the gathered bytes
for work in works:
    work.wait()
assert torch.equal(gathered.clone(), sevens), gathered.clone()
assert all(torch.equal(other.clone(), torch.ones_like(sevens)) for other in others)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_on_the_cpu_leave_states_at_home_and_have_the_same_bits_whenever_they_are(dtype):
    def train(update_in, update_on, steps=5):
        model = network().to(dtype)
        offloader = ebb.Offloader("cuda")
        offloader.manage(model, device_bytes="1GiB")
        optimizer = ebb.AdamW(model.parameters(), lr=1e-2, update_in=update_in, update_on=update_on)
        for _ in range(steps):
            with offloader:
                loss = model(data().to(dtype)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = [each.detach().clone() for each in model.parameters()]
        offloader.drain()
        of_weights = sum(each.nbytes for each in weights)
        stay = offloader.stats().managed_on_device.now_bytes > 2 * of_weights
        assert stay == (update_on == "device")
        return weights

    expected = train("step", "cpu")
    for update_in in ("backward", "next_use"):
        for one, other in zip(train(update_in, "cpu"), expected, strict=True):
            assert torch.equal(one, other)
    units = 8 * torch.finfo(dtype).eps if dtype == torch.float32 else torch.finfo(dtype).eps  # of the master, rounded
    for one, other in zip(train("step", "device", steps=1), train("step", "cpu", steps=1), strict=True):
        torch.testing.assert_close(one, other, rtol=units, atol=units * 1e-2)


def test_an_update_on_the_cpu_is_of_the_gradient_as_it_was():
    def train(update_in):
        weight = torch.linspace(-1, 1, 1 << 22, device="cuda").requires_grad_()
        offloader = ebb.Offloader("cuda")
        offloader.manage([weight], device_bytes=0, gradients=False)
        held = []
        weight.register_post_accumulate_grad_hook(lambda leaf: held.append(leaf.grad))
        optimizer = ebb.AdamW([weight], lr=1e-2, update_in=update_in, update_on="cpu")
        for _ in range(4):
            (weight.sin() * 3).sum().backward()
            optimizer.step()
            held.pop().zero_()
            optimizer.zero_grad()
        return weight.detach().clone()

    expected = train("step")
    assert torch.equal(train("backward"), expected)
    assert torch.equal(train("next_use"), expected)


def test_a_collective_on_a_managed_tensor_is_over_before_the_bytes_go_home(tmp_path):
    run_python(f"PATH = {str(tmp_path / 'store')!r}\n" + COLLECTIVE)
