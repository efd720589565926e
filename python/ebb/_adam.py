"""AdamW and Adam."""

from typing import Any

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from ebb._optimizer import Optimizer, UpdateIn, UpdateOn, check_at_least_0, is_number


class _WithMoments(Optimizer):
    _states = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    @staticmethod
    def _wanted(group: dict[str, Any]) -> tuple[str, ...]:
        return _WithMoments._states[: 3 if group["amsgrad"] else 2]

    @staticmethod
    def _numbers(group: dict[str, Any]) -> dict[str, float]:
        beta1, beta2 = group["betas"]
        names = ("lr", "eps", "weight_decay", "amsgrad")
        return {"beta1": float(beta1), "beta2": float(beta2)} | {name: float(group[name]) for name in names}


class AdamW(_WithMoments):
    """AdamW (Loshchilov, Hutter: Decoupled Weight Decay Regularization, 2019).

    As torch.optim.AdamW, with states that live where their parameters do, and float32 masters of parameters in bfloat16
    or half. update_in: when parameters are updated, "step", "backward" or "next_use". update_on: by what, "device" or
    "cpu". ebb.Optimizer has the contract.
    """

    _kind = "AdamW"

    @staticmethod
    def _do_states_take_parameter(group: dict[str, Any]) -> bool:
        return False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        update_in: UpdateIn = "step",
        update_on: UpdateOn = "device",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"amsgrad": amsgrad, "maximize": maximize}, update_in, update_on)

    @staticmethod
    def _check(group: dict[str, Any]) -> None:
        _check("AdamW", group)

    @staticmethod
    def _update_rows(
        target: torch.Tensor,
        gradient: torch.Tensor,
        states: dict[str, torch.Tensor],
        new: set[str],
        steps: torch.Tensor,
        group: dict[str, Any],
    ) -> None:
        _update(adamw, target, gradient, states, steps, group)


class Adam(_WithMoments):
    """Adam (Kingma, Ba: Adam: A Method for Stochastic Optimization, 2015).

    As torch.optim.Adam, with states that live where their parameters do, and float32 masters of parameters in bfloat16 or
    half. update_in: when parameters are updated, "step", "backward" or "next_use". update_on: by what, "device" or "cpu".
    ebb.Optimizer has the contract.
    """

    _kind = "Adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        update_in: UpdateIn = "step",
        update_on: UpdateOn = "device",
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"amsgrad": amsgrad, "maximize": maximize}, update_in, update_on)

    @staticmethod
    def _check(group: dict[str, Any]) -> None:
        _check("Adam", group)

    @staticmethod
    def _update_rows(
        target: torch.Tensor,
        gradient: torch.Tensor,
        states: dict[str, torch.Tensor],
        new: set[str],
        steps: torch.Tensor,
        group: dict[str, Any],
    ) -> None:
        _update(adam, target, gradient, states, steps, group)


def _update(
    function: Any,
    target: torch.Tensor,
    gradient: torch.Tensor,
    states: dict[str, torch.Tensor],
    steps: torch.Tensor,
    group: dict[str, Any],
) -> None:
    function(
        [target],
        [gradient],
        [states["exp_avg"]],
        [states["exp_avg_sq"]],
        [states["max_exp_avg_sq"]] if group["amsgrad"] else [],
        [steps.clone()],  # to which 1 is added
        foreach=False,
        fused=False,
        has_complex=target.is_complex(),
        amsgrad=group["amsgrad"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def _check(kind: str, group: dict[str, Any]) -> None:
    check_at_least_0(kind, group, "lr", "eps", "weight_decay")
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(is_number(b) and 0 <= b < 1 for b in betas):
        raise ValueError(f"ebb: {kind} got betas={betas!r}, and takes two numbers in [0, 1)")
