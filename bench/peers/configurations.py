"""What a user would pick for fitting a training step into the GPU's memory, each as its own documentation has it."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from types import ModuleType

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .model import Workload

# One step's gradients. Calls its argument right after the head's linear.
Step = Callable[[Callable[[], None]], tuple[Tensor, ...]]


def none(workload: Workload) -> Step:
    def step(after_head: Callable[[], None]) -> tuple[Tensor, ...]:
        hidden = workload.hidden()
        return workload.gradients(workload.loss(hidden, after_head))

    return step


def save_on_cpu(workload: Workload) -> Step:
    def step(after_head: Callable[[], None]) -> tuple[Tensor, ...]:
        with torch.autograd.graph.save_on_cpu(pin_memory=workload.tokens.is_cuda):
            hidden = workload.hidden()
        return workload.gradients(workload.loss(hidden, after_head))

    return step


def checkpoint_blocks(workload: Workload) -> Step:
    def step(after_head: Callable[[], None]) -> tuple[Tensor, ...]:
        hidden = workload.hidden(partial(checkpoint, use_reentrant=False))
        return workload.gradients(workload.loss(hidden, after_head))

    return step


def offload_activations(workload: Workload, package: ModuleType) -> Step:
    # One manager for all steps, as in the packages' own recipes and trainers.
    offload, no_op = package.OffloadActivations(), package.NoOpManager()
    if hasattr(offload, "update_model_params"):  # TRL's; torchtune's knows parameters by their type only
        offload.update_model_params(workload.model)

    def step(after_head: Callable[[], None]) -> tuple[Tensor, ...]:
        # Backward is inside, as in TRL's trainer: its manager waits for all copies when it is left.
        with offload:
            hidden = workload.hidden()
            with no_op:
                loss = workload.loss(hidden, after_head)
            return workload.gradients(loss)

    return step


def import_alone(name: str) -> ModuleType:
    """Imports a module without running the `__init__` of the packages that it lies in."""
    for package in accumulate(name.split(".")[:-1], "{}.{}".format):
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise ModuleNotFoundError(f"No module named '{package}'")
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(name)


def torchtune(workload: Workload) -> Step:
    # torchtune's own `__init__` would import its data sets and tokenizers too, and all that these depend on.
    return offload_activations(workload, import_alone("torchtune.training._activation_offloading"))


def trl(workload: Workload) -> Step:
    package = importlib.import_module("trl.models.activation_offloading")
    # TRL's warning about host memory fails in a process that has not called this, as its trainer does.
    importlib.import_module("accelerate").PartialState()
    return offload_activations(workload, package)


CONFIGURATIONS: dict[str, Callable[[Workload], Step]] = {
    "none": none,
    "save_on_cpu": save_on_cpu,
    "torchtune": torchtune,
    "trl": trl,
    "checkpoint": checkpoint_blocks,
}
