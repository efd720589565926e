"""One model, trained with ebb and without."""

import random
from functools import cache
from typing import Literal, NamedTuple

import numpy
import torch
from isolated import Verdict, in_one_line
from modes import MakeOptimizer, Mode, Sizes
from torch import Tensor
from torch.nn import Module
from zoo import Attention, Toy

import ebb


class Setting(NamedTuple):
    """How a model computes, with ebb and without."""

    attention: Attention
    dtype: Literal["float32", "bfloat16"]
    checkpoint: Literal["none", "reentrant", "non-reentrant"]

    def __str__(self) -> str:
        return " ".join((self.attention, self.dtype, f"checkpoint:{self.checkpoint}"))


def settings(toy: Toy, every: bool) -> list[Setting]:
    """Those that the model has; unless `every`, half of them, in which each two choices meet."""
    model = toy.make("eager")
    attentions = ("eager", "sdpa") if toy.has_attentions(model) else ("eager",)
    checkpoints = ("none", "reentrant", "non-reentrant") if toy.has_checkpoint(model) else ("none",)
    found = [Setting(a, d, c) for a in attentions for d in ("float32", "bfloat16") for c in checkpoints]
    if every or len(found) < 12:
        return found
    return [
        each
        for each in found
        if (each.attention == "eager") ^ (each.dtype == "bfloat16") ^ (each.checkpoint == "reentrant")
    ]


Record = dict[str, Tensor]  # what one step gives, by name


class Trial:
    """A model in a setting. Each training of it begins with the same weights and has the same batch and dropout."""

    def __init__(self, toy: Toy, setting: Setting, device: str, seed: int) -> None:
        self._toy, self._setting, self._device, self._seed = toy, setting, device, seed
        self._dtype = getattr(torch, setting.dtype)
        _set_seed(seed)
        self._batch = {name: self._moved(each) for name, each in toy.batch().items()}
        self._plain = cache(lambda *arguments: self._train(self._new_model(), *arguments))
        self._sizes = cache(self._measure)

    def judge(self, mode: Mode) -> tuple[Verdict, str]:
        """Whether the mode changes nothing, and what it changes."""
        try:
            self._plain(mode.plain_optimizer, mode.steps)
            sizes = self._sizes()
        except Exception as error:
            return "skipped", f"without ebb: {in_one_line(error)}"
        try:
            model = self._new_model()
            offloader = mode.wrap(model, sizes, self._device)
            records = self._train(model, mode.optimizer, mode.steps)
        except Exception as error:
            return "failed", in_one_line(error)
        difference = self._difference(records, mode)
        if difference is None:
            return ("passed", "") if mode.acted(offloader) else ("skipped", "the mode found nothing to do")
        again = self._train(self._new_model(), mode.plain_optimizer, mode.steps)
        if self._difference(again, mode) is not None:
            return "skipped", "without ebb: other bits in each run"
        return "failed", difference

    def _difference(self, records: list[Record], mode: Mode) -> str | None:
        expected = self._plain(mode.plain_optimizer, mode.steps)
        for step, (ours, plain) in enumerate(zip(records, expected, strict=True), 1):
            if not mode.has_gradients:
                plain = {name: each for name, each in plain.items() if not name.startswith(GRADIENT)}
            if ours.keys() != plain.keys():
                return f"step {step}: there is {ours.keys() ^ plain.keys()}, or is not"
            wrong = [name for name in plain if not _same(ours[name], plain[name])]
            if wrong:
                return f"step {step}: {len(wrong)} of {len(plain)} differ: {wrong[0]} by {_distance(ours, plain, wrong[0])}"
        return None

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else None)

    def _new_model(self) -> Module:
        _set_seed(self._seed)
        model = self._toy.make(self._setting.attention).train().to(self._device, self._dtype)
        if self._setting.checkpoint != "none":
            self._toy.checkpoint(model, self._setting.checkpoint == "reentrant")
        return model

    def _train(self, model: Module, make_optimizer: MakeOptimizer, steps: int) -> list[Record]:
        optimizer = make_optimizer(model.parameters())
        records = []
        for step in range(steps):
            _set_seed(self._seed + step)
            optimizer.zero_grad()
            loss = self._toy.loss(model, self._batch)
            loss.backward()
            named = model.named_parameters()
            gradients = {f"{GRADIENT} {name}": each.grad.clone() for name, each in named if each.grad is not None}
            optimizer.step()
            records.append({"loss": loss.detach(), **gradients})
        state = (*model.named_parameters(), *model.named_buffers())
        records[-1] |= {name: each.detach().clone() for name, each in state}
        return records

    def _measure(self) -> Sizes:
        model = self._new_model()
        offloader = ebb.wrap(model, keep=[], device=self._device, policy=ebb.policies.keep_everything())
        self._toy.loss(model, self._batch).backward()
        parameters = sum(each.nbytes for each in model.parameters())
        return Sizes(saved=offloader.stats().saved_if_kept.peak_bytes, parameters=parameters)


GRADIENT = "gradient of"


def _set_seed(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def _same(a: Tensor, b: Tensor) -> bool:
    return (
        (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def _distance(ours: Record, plain: Record, name: str) -> str:
    if (ours[name].dtype, ours[name].shape) != (plain[name].dtype, plain[name].shape):
        return "its type or its shape"
    return f"{(ours[name].double() - plain[name].double()).abs().max():.2g}"
