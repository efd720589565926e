"""SGD with momentum."""

from typing import Any

import torch
from torch.optim.sgd import sgd

from ebb._optimizer import Optimizer, UpdateIn, UpdateOn, check_at_least_0, is_number


class SGD(Optimizer):
    """Stochastic gradient descent with momentum.

    As torch.optim.SGD, with momentum that lives where the parameters do, and float32 masters of parameters in bfloat16 or
    half. update_in: when parameters are updated, "step", "backward" or "next_use". update_on: by what, "device" or "cpu".
    ebb.Optimizer has the contract.
    """

    _kind = "SGD"
    _states = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        update_in: UpdateIn = "step",
        update_on: UpdateOn = "device",
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"nesterov": nesterov, "maximize": maximize}, update_in, update_on)

    @staticmethod
    def _check(group: dict[str, Any]) -> None:
        check_at_least_0("SGD", group, "lr", "momentum", "weight_decay")
        if not is_number(group["dampening"]):
            raise ValueError(f"ebb: SGD got dampening={group['dampening']!r}, and takes a number")
        if group["nesterov"] and (group["momentum"] == 0 or group["dampening"] != 0):
            raise ValueError("ebb: SGD with nesterov needs momentum, and no dampening")

    @staticmethod
    def _wanted(group: dict[str, Any]) -> tuple[str, ...]:
        return () if group["momentum"] == 0 else SGD._states

    @staticmethod
    def _numbers(group: dict[str, Any]) -> dict[str, float]:
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
        return {name: float(group[name]) for name in names}

    @staticmethod
    def _update_rows(
        target: torch.Tensor,
        gradient: torch.Tensor,
        states: dict[str, torch.Tensor],
        new: set[str],
        steps: torch.Tensor,
        group: dict[str, Any],
    ) -> None:
        buffer = states.get("momentum_buffer") if group["momentum"] != 0 else None
        buffers = [None if new else buffer]  # torch's sgd() makes the first
        sgd(
            [target],
            [gradient],
            buffers,
            foreach=False,
            fused=False,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if new and buffer is not None and buffers[0] is not None:
            buffer.copy_(buffers[0])
