"""What every test uses: an offloader that moves whatever it can, and steps beside plain autograd."""

import contextlib
import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch

import ebb

torch.set_num_threads(1)


@pytest.fixture
def offloader():
    """On the CPU; moves whatever autograd saves, and must have none of it left when the test is over."""
    made = ebb.Offloader("cpu", ebb.policies.offload_everything())
    yield made
    gc.collect()
    assert made.stats().pool.now_bytes == 0


class Model(torch.nn.Module):
    """A small network with a head, in which most kinds of saves occur."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(16, width),
            torch.nn.GELU(),
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, width),
            torch.nn.Tanh(),
            torch.nn.Dropout(0.1),
        )
        self.head = torch.nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def new_model() -> Model:
    torch.manual_seed(7)
    return Model()


def data(rows: int = 24) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(3))


Step = Callable[[contextlib.AbstractContextManager], list[torch.Tensor]]


def results(step: Step, guard: contextlib.AbstractContextManager) -> list[torch.Tensor]:
    torch.manual_seed(11)
    return [each.detach().clone() for each in step(guard)]


def assert_same(step: Step, offloader: ebb.Offloader, moves: bool = True) -> None:
    """step(guard) runs forward under the guard and backward, and returns what must be equal bit for bit."""
    plain = results(step, contextlib.nullcontext())
    before = offloader.stats().offloaded.tensors
    ours = results(step, offloader)
    assert len(plain) == len(ours) > 0
    for number, (a, b) in enumerate(zip(plain, ours, strict=True)):
        assert torch.equal(a, b), f"result {number} differs"
    moved = offloader.stats().offloaded.tensors - before
    assert (moved > 0) == moves, f"{moved} storages were moved"


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def run_python(program: str, timeout: float = 120) -> str:
    """What a program of its own prints. It must end by itself, with status 0; after `timeout` seconds a stack is printed."""
    program = f"import faulthandler; faulthandler.dump_traceback_later({timeout}, exit=True)\n" + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout + 30)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Ends with the line that `./dev test` counts."""
    count = {kind: len(terminalreporter.stats.get(kind, [])) for kind in ("passed", "failed", "error", "skipped")}
    failed = count["failed"] + count["error"]
    terminalreporter.write_line(f"cases: {count['passed']} passed, {failed} failed, {count['skipped']} skipped")
