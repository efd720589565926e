"""The ways in which a program may use ebb, and what each is compared with."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter

import ebb
from ebb.policies import minimum_size, recompute

MakeOptimizer = Callable[[Iterable[Parameter]], Any]


class WithMasters:
    """An optimizer of torch's over float32 copies of parameters, which are then rounded to the parameters."""

    def __init__(self, kind: type[torch.optim.Optimizer], parameters: Iterable[Parameter], **options: Any) -> None:
        self._parameters = list(parameters)
        self._masters = [each.detach().float() for each in self._parameters]
        self._optimizer = kind(self._masters, foreach=False, **options)

    def zero_grad(self) -> None:
        for each in self._parameters:
            each.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self._optimizer.step()
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            parameter.copy_(master)


class Rule(NamedTuple):
    """An optimizer of torch's, of torch's over masters, and of ebb's."""

    name: str
    options: dict[str, Any]

    def torchs(self, parameters: Iterable[Parameter]) -> Any:
        return getattr(torch.optim, self.name)(parameters, foreach=False, **self.options)

    def with_masters(self, parameters: Iterable[Parameter]) -> Any:
        return WithMasters(getattr(torch.optim, self.name), parameters, **self.options)

    def ebbs(self, update_in: str) -> MakeOptimizer:
        return lambda parameters: getattr(ebb, self.name)(parameters, update_in=update_in, **self.options)


ADAMW = Rule("AdamW", {"lr": 1e-2})
ADAM = Rule("Adam", {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True})
SGD = Rule("SGD", {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9})


class Sizes(NamedTuple):
    """In bytes: what autograd saves in a step, and the parameters."""

    saved: int
    parameters: int


class Mode(NamedTuple):
    """options: Offloader's. managed: manage()'s, or None. acted: whether the offloader did what the mode is for."""

    acted: Callable[[ebb.Offloader], bool]
    options: Callable[[Sizes], dict[str, Any]]
    managed: Callable[[Sizes], dict[str, Any]] | None = None
    optimizer: MakeOptimizer = ADAMW.torchs
    plain_optimizer: MakeOptimizer = ADAMW.torchs
    steps: int = 4  # a plan is made from the first two, and the third is the first that follows the plan
    has_gradients: bool = True  # after backward

    def wrap(self, model: Module, sizes: Sizes, device: str) -> ebb.Offloader:
        offloader = ebb.wrap(model, keep=[], device=device, **self.options(sizes))
        if self.managed is not None:
            offloader.manage(model, minimum_bytes=1, **self.managed(sizes))
        return offloader


def _moved(offloader: ebb.Offloader) -> bool:
    return offloader.stats().offloaded.tensors > 0


def _dropped(offloader: ebb.Offloader) -> bool:
    return offloader.stats().dropped.tensors > 0


def _planned(offloader: ebb.Offloader) -> bool:
    return offloader.plan_report() is not None


def _managed(offloader: ebb.Offloader) -> bool:
    return offloader.stats().managed.tensors > 0


def _policy(policy: ebb.policies.PolicyLike, acted: Callable[[ebb.Offloader], bool]) -> Mode:
    return Mode(acted, lambda sizes: {"policy": policy})


def _goal(goal: Callable[[Sizes], dict[str, Any]]) -> Mode:
    return Mode(_planned, lambda sizes: {"planned_minimum_bytes": 1, **goal(sizes)})


def _bound(optimizer: MakeOptimizer, plain_optimizer: MakeOptimizer) -> Mode:
    return Mode(
        _managed,
        lambda sizes: {"policy": minimum_size(1)},
        lambda sizes: {"device_bytes": sizes.parameters},  # a quarter of weights, gradients and two moments
        optimizer,
        plain_optimizer,
    )


MODES: dict[str, Mode] = {
    "wrap": _policy(minimum_size(1), _moved),
    "recompute": _policy(recompute(), _dropped),
    "recompute-compute-bound": _policy(recompute(ebb.Recompute.COMPUTE_BOUND, minimum_size(1)), _dropped),
    "least-memory": _goal(lambda sizes: {"least_memory": True}),
    "slowdown": _goal(lambda sizes: {"slowdown": 0.1}),
    "budget": _goal(lambda sizes: {"device_budget": sizes.saved // 2, "device_budget_is_a_wish": True}),
    "managed": _bound(ADAMW.torchs, ADAMW.torchs),
    "managed-planned": _goal(
        lambda sizes: {"device_budget": sizes.saved // 2 + 2 * sizes.parameters, "device_budget_is_a_wish": True}
    )._replace(managed=lambda sizes: {}, steps=10),
    "adamw-step": _bound(ADAMW.ebbs("step"), ADAMW.with_masters),
    "adamw-next-use": _bound(ADAMW.ebbs("next_use"), ADAMW.with_masters),
    "adamw-backward": _bound(ADAMW.ebbs("backward"), ADAMW.with_masters)._replace(has_gradients=False),
    "adam-step": _bound(ADAM.ebbs("step"), ADAM.with_masters),
    "sgd-next-use": _bound(SGD.ebbs("next_use"), SGD.with_masters),
}
