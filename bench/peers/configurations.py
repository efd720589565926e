"""What a user would pick for fitting a training step into the GPU's memory, each as its own documentation has it."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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


def checkpointing_step(workload: Workload, call_block: Callable[..., Tensor]) -> Step:
    def step(after_head: Callable[[], None]) -> tuple[Tensor, ...]:
        hidden = workload.hidden(call_block)
        return workload.gradients(workload.loss(hidden, after_head))

    return step


checkpoint_block = partial(checkpoint, use_reentrant=False)


def checkpoint_blocks(workload: Workload) -> Step:
    return checkpointing_step(workload, checkpoint_block)


def checkpoint_first(workload: Workload, count: int) -> Step:
    """The first blocks, as Megatron's "block" method: in backward theirs is the turn when the others' memory is free."""
    if not 0 <= count <= len(workload.blocks):
        raise ValueError(f"{count} of {len(workload.blocks)} blocks cannot be checkpointed")
    chosen = set(workload.blocks[:count])

    def call_block(block: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
        return checkpoint_block(block, *arguments, **named) if block in chosen else block(*arguments, **named)

    return checkpointing_step(workload, call_block)


aten = torch.ops.aten
MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default})
# One for each kernel that scaled_dot_product_attention may pick.
ATTENTIONS = frozenset(
    {
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


class Kept:
    """Which operations' outputs a block keeps for backward; all others run again there. One object for each block and
    step."""

    def __init__(self, operations: frozenset[OpOverload], every_second_matmul: bool = False) -> None:
        self.operations, self.every_second_matmul = operations, every_second_matmul
        self.seen: set[OpOverload] = set()
        self.matmuls = {False: 0, True: 0}  # in the first run and in the second

    def __call__(self, context: Any, operation: OpOverload, *arguments: Any, **named: Any) -> CheckpointPolicy:
        keeps = operation in self.operations
        if keeps and self.every_second_matmul and operation in MATMULS:
            self.matmuls[context.is_recompute] += 1
            keeps = self.matmuls[context.is_recompute] % 2 == 1
        if keeps:
            self.seen.add(operation)
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_selectively(workload: Workload, **kept: Any) -> Step:
    def call_block(block: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
        policy = Kept(**kept)
        output = checkpoint_block(
            block, *arguments, context_fn=partial(create_selective_checkpoint_contexts, policy), **named
        )
        # A kernel with another name would be run again without a word.
        if policy.seen.isdisjoint(ATTENTIONS):
            raise RuntimeError("none of the attention operations that are to be kept has run")
        return output

    return checkpointing_step(workload, call_block)


# Only what is bound by memory runs again.
checkpoint_cheap = partial(checkpoint_selectively, operations=MATMULS | ATTENTIONS)
# What grows with the square of the sequence's length stays.
checkpoint_all_but_attention = partial(checkpoint_selectively, operations=ATTENTIONS)
# As torchtitan's selective activation checkpointing by operations: attention and every second matmul stay.
checkpoint_torchtitan = partial(checkpoint_selectively, operations=MATMULS | ATTENTIONS, every_second_matmul=True)


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
    # transformers imports a torchao that it finds, for minutes at times: a folder of both that is not on the path yet.
    if folder := os.environ.get("TORCHTUNE_FOLDER"):
        sys.path.append(folder)
    # torchtune's own `__init__` would import its data sets and tokenizers too, and all that these depend on.
    return offload_activations(workload, import_alone("torchtune.training._activation_offloading"))


def trl(workload: Workload) -> Step:
    package = importlib.import_module("trl.models.activation_offloading")
    # TRL's warning about host memory fails in a process that has not called this, as its trainer does.
    importlib.import_module("accelerate").PartialState()
    return offload_activations(workload, package)


def ebb_python(workload: Workload, **options: Any) -> Step:
    """ebb's Python package, with `options` of its Offloader."""
    ebb = importlib.import_module("ebb")
    offloader = ebb.Offloader(workload.tokens.device, **options)

    def step(after_head: Callable[[], None]) -> tuple[Tensor, ...]:
        with offloader:
            hidden = workload.hidden()
            with ebb.no_offload():
                loss = workload.loss(hidden, after_head)
        return workload.gradients(loss)

    return step


EBB_PYTHON = "ebb_python"
CONFIGURATIONS: dict[str, Callable[[Workload], Step]] = {
    "none": none,
    EBB_PYTHON: ebb_python,
    "save_on_cpu": save_on_cpu,
    "torchtune": torchtune,
    "trl": trl,
    "checkpoint": checkpoint_blocks,
    "checkpoint_cheap": checkpoint_cheap,
    "checkpoint_all_but_attention": checkpoint_all_but_attention,
    "checkpoint_torchtitan": checkpoint_torchtitan,
}
CHECKPOINT_SOME = "checkpoint:"  # and the number of blocks
EBB_PYTHON_WITHIN = f"{EBB_PYTHON}:"  # and a size


def configuration(name: str) -> Callable[[Workload], Step]:
    if name.startswith(CHECKPOINT_SOME):
        return partial(checkpoint_first, count=int(name.removeprefix(CHECKPOINT_SOME)))
    if name.startswith(EBB_PYTHON_WITHIN):
        return partial(ebb_python, device_budget=name.removeprefix(EBB_PYTHON_WITHIN))
    return CONFIGURATIONS[name]
