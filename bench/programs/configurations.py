"""What a user would do to fit a program into the GPU's memory. Each is entered around a program that is as written."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from bench.peers.configurations import ATTENTIONS, MATMULS, Kept, checkpoint_block
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from .programs import Program

GUARD = Callable[[], AbstractContextManager[Any]]  # around each step
CALL = "_compiled_call_impl"  # what a module's call runs, compiled or not

Entered = AbstractContextManager[GUARD]


@contextmanager
def none(program: Program) -> Iterator[GUARD]:
    yield nullcontext


@contextmanager
def called_by(program: Program, call: Callable[..., Any], count: int | None = None) -> Iterator[GUARD]:
    """The first blocks are called by `call`."""
    chosen = program.blocks[:count]
    before = [getattr(block, CALL) for block in chosen]
    for block in chosen:
        setattr(block, CALL, partial(call, getattr(block, CALL) or block._call_impl))
    try:
        yield nullcontext
    finally:
        for block, call in zip(chosen, before, strict=True):
            setattr(block, CALL, call)


def checkpoint(program: Program, share: float = 1) -> Entered:
    return called_by(program, checkpoint_block, round(share * len(program.blocks)))


def checkpoint_selectively(program: Program, every_second_matmul: bool) -> Entered:
    def call(block: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        policy = Kept(MATMULS | ATTENTIONS, every_second_matmul)
        return checkpoint_block(
            block, *inputs, context_fn=partial(create_selective_checkpoint_contexts, policy), **named
        )

    return called_by(program, call)


@contextmanager
def transformers_offload(program: Program) -> Iterator[GUARD]:
    model: Any = program.model
    model.gradient_checkpointing_enable({"use_reentrant": False}, offload=True)
    if hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
    try:
        yield nullcontext
    finally:
        model.gradient_checkpointing_disable()


@contextmanager
def trl(program: Program) -> Iterator[GUARD]:
    package = importlib.import_module("trl.models.activation_offloading")
    importlib.import_module("accelerate").PartialState()
    offload = package.OffloadActivations()
    offload.update_model_params(program.model)
    yield lambda: offload


@contextmanager
def wrapped(program: Program, manages: bool = False, device_bytes: int | None = None, **options: Any) -> Iterator[GUARD]:
    ebb = importlib.import_module("ebb")
    offloader = ebb.wrap(program.model, device=program.parameters[0].device, **options)
    if manages:
        offloader.manage(program.model, device_bytes=device_bytes)
    program.offloader = offloader
    try:
        yield nullcontext
    finally:
        ebb.unwrap(program.model)
        if manages:
            offloader.release(program.model)
        program.offloader = None


@contextmanager
def by_hand(program: Program, device_bytes: int) -> Iterator[GUARD]:
    """What the program trains at home, and checkpointing; all other saves stay."""
    policies = importlib.import_module("ebb").policies
    managed = wrapped(program, manages=True, device_bytes=device_bytes, policy=policies.keep_everything())
    with managed as guard, checkpoint(program):
        yield guard


def plan(program: Program, budget: int, manages: bool = False, **options: Any) -> Entered:
    return wrapped(program, manages, device_budget=budget, device_budget_is_a_wish=True, **options)


def least(program: Program, **options: Any) -> Entered:
    return wrapped(program, least_memory=True, **options)


HALF, THREE_QUARTERS = 0.5, 0.75
BY_HAND: dict[str, Callable[[Program], Entered]] = {
    "none": none,
    "all moved": wrapped,
    "checkpoint": checkpoint,
    "checkpoint half": partial(checkpoint, share=HALF),
    "checkpoint three quarters": partial(checkpoint, share=THREE_QUARTERS),
    "checkpoint, torchtitan's": partial(checkpoint_selectively, every_second_matmul=True),
    "checkpoint, the cheap": partial(checkpoint_selectively, every_second_matmul=False),
    "transformers' offload": transformers_offload,
    "TRL": trl,
}
