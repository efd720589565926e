"""A thousand rounds of what programs do between steps leave nothing behind: neither memory nor objects of Python's."""

import textwrap

import pytest

from conftest import run_python

HEAD = """
import ctypes, gc, os, sys, tempfile, torch, ebb
torch.set_num_threads(1)

class Mallinfo(ctypes.Structure):           # glibc's struct mallinfo2
    _fields_ = [(each, ctypes.c_size_t) for each in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo

def footprint():
    gc.collect()
    heap = libc.mallinfo2()
    return heap.uordblks + heap.hblkhd, sys.getallocatedblocks()

offloader = ebb.Offloader("cpu", ebb.policies.offload_everything())
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)])
def backward(model):
    model(torch.ones(8, 64)).sin().sum().backward()

def manage():
    offloader.manage(model, device_bytes="32KiB", minimum_bytes=1)
    for _ in range(70_000):                 # the order of uses is remembered, up to 131,072 of them
        model[0].bias.neg()
        model[1].bias.neg()

def judge(a_round, rounds=1000):
    for i in range(rounds):
        a_round(i)
        if i == rounds * 2 // 5:
            heap, objects = footprint()
    more, more_objects = (after - before for after, before in zip(footprint(), (heap, objects)))
    print(more, more_objects)
    later = rounds * 3 // 5
    assert more < 200 * later, f"{more / later} bytes a round"
    assert more_objects < later, f"{more_objects / later} objects a round"
    print("done")
"""

PROGRAMS = {
    "looks at storages": """
        manage()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        def a_round(i):
            with offloader:
                hidden = model[0](torch.ones(8, 64))
                hidden.untyped_storage()
                loss = model[2](model[1](hidden).sin()).sum()
            loss.backward()
            for each in model.parameters():
                each.untyped_storage(), each.grad.untyped_storage(), each.data.untyped_storage()
            optimizer.step()
            for state in optimizer.state.values():
                state["exp_avg"].untyped_storage()
            optimizer.zero_grad()
        """,
    "saves": """
        manage()
        folder = tempfile.TemporaryDirectory()
        path = os.path.join(folder.name, "checkpoint")
        def a_round(i):
            model = torch.nn.Linear(64, 64)
            offloader.manage(model, device_bytes=0, minimum_bytes=1)
            optimizer = ebb.AdamW(model.parameters(), update_in="next_use")
            backward(model)
            optimizer.step()
            ebb.save({"model": model.state_dict(), "optimizer": optimizer}, path)
            known = torch.load(path)
            model.load_state_dict(known["model"])
            optimizer.load_state_dict(known["optimizer"])
            backward(model)
            optimizer.step()
            assert offloader.stats().managed.tensors < 30      # those of this round, and of what Python still collects
        """,
    "unfreezes": """
        manage()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        def a_round(i):
            for number, layer in enumerate(model):
                layer.requires_grad_(number == i % 3 or number == 2)
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
            if i % 10 == 9:
                offloader.release(model[0])
                offloader.manage(model[0])
        """,
    "wraps and unwraps": """
        def a_round(i):
            of_round = ebb.wrap(model, keep=[], device="cpu")
            backward(model)
            model.zero_grad()
            if i % 2:
                of_round.manage(model[0], device_bytes=0, minimum_bytes=1)
                backward(model)
                of_round.release(model)
            ebb.unwrap(model)
        """,
    "raises under a guard, in backward and in an update": """
        manage()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        class Raises(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * 1
            @staticmethod
            def backward(ctx, gradient):
                raise RuntimeError("backward")
        def a_round(i):
            try:
                with offloader:
                    hidden = model[0](torch.ones(8, 64)).sin()
                    if i % 3 == 0:
                        raise RuntimeError("forward")
                    hidden = Raises.apply(hidden) if i % 3 == 1 else hidden
                model[1](hidden).sum().backward()
                optimizer.param_groups[0]["lr"] = "no number"
                optimizer.step()
            except (RuntimeError, TypeError, ValueError):
                pass
            optimizer.param_groups[0]["lr"] = 1e-3
            optimizer.zero_grad()
        """,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_leaves_nothing_behind_that(program):
    text = HEAD + textwrap.dedent(PROGRAMS[program]) + "\njudge(a_round)\n"
    assert run_python(text, timeout=240).splitlines()[-1] == "done"
