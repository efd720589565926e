"""Runs a program with plain autograd and under a setting, and compares."""

import dataclasses
import gc
from collections.abc import Iterator

import torch

import ebb
from random_programs.program import Program, has_foreign_hooks, to_text, uncounted, writes
from random_programs.running import Entry, Identity, Offloaded, Plain, Run, execute
from random_programs.setting import Setting, make_offloader

UNPLANNED_STEPS = 2  # without a plan, all steps are alike


@dataclasses.dataclass
class Tally:
    """What happened, added up."""

    runs: int = 0
    saved: int = 0
    offloaded: int = 0
    recomputed: int = 0
    planned: int = 0  # runs that followed a plan
    errors: int = 0  # programs in which plain autograd raised
    unsteady: int = 0  # programs that plain autograd itself computes now so, now otherwise
    refusals: int = 0  # runs that ended at a write which may be an error

    def __iadd__(self, other: "Tally") -> "Tally":
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


def _is_write(entry: Entry) -> bool:
    return entry[0].endswith("error") and entry[1] == ("RuntimeError", "modified by an inplace operation")


def _difference(entry: Entry, ours: Entry) -> str:
    if entry[0] != ours[0]:
        return f"{ours[0]}: {ours[1]!r:.300}, where plain autograd has {entry[0]}: {entry[1]!r:.300}"
    if (
        isinstance(entry[1], tuple)
        and isinstance(ours[1], tuple)
        and entry[1][:3] == ours[1][:3]
        and len(entry[1]) == 4
    ):
        dtype = entry[1][2]
        a, b = (torch.frombuffer(bytearray(each), dtype=dtype).double() for each in (entry[1][3], ours[1][3]))
        return f"{entry[0]} differs by {(a - b).abs().max().item():.3g} where the largest is {a.abs().max().item():.3g}"
    return f"{entry[0]} is {ours[1]!r:.300} and not {entry[1]!r:.300}"


class Checker:
    """Of one program. Its runs with plain autograd are made once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._source = to_text(program)
        self._uncounted = uncounted(program)
        self._plain = self._run(Plain())
        self._identity: list[Entry] | None = None
        self.tally = Tally(errors=any(label.endswith("error") for label, _ in self._plain))

    def wrong(self, setting: Setting) -> str | None:
        """What differs under the setting from plain autograd, or is left behind."""
        offloader, other = make_offloader(setting), ebb.Offloader("cpu", ebb.policies.offload_everything(), home="host")
        steps = self._program.steps if setting.is_planned else min(self._program.steps, UNPLANNED_STEPS)
        ours = self._run(Offloaded(offloader, other), steps)
        stats = offloader.stats()
        self.tally += Tally(1, stats.saved.tensors, stats.offloaded.tensors, stats.recomputed.tensors)
        self.tally.planned += offloader.plan_report() is not None
        if ours == self._plain[: len(ours)]:
            return self._left(offloader) if not self.tally.errors else None
        if self._identity is None:
            self._identity = self._run(Identity())
        for number, entry in enumerate(ours):
            if _is_write(entry) and self._may_be_refused(setting):
                self.tally.refusals += 1
                return None
            expected = list(self._expected(number))
            if any(self._is_refused_by_uncounted(each) for each in expected):
                return None
            if any(self._is_refused_by_torch(each) for each in expected) and not entry[0].endswith("error"):
                return None
            if entry not in expected:
                return self._judged(entry, expected)
        return None

    def _may_be_refused(self, setting: Setting) -> bool:
        """Whether a write may be an error that plain autograd does not raise, or raises later.

        A write to a recipe's input is one: Note [Operations again] in offload/recompute/log_recipe.h. So is a
        write to an input of ebb's own region, and to what an inner guard saved: the identity hooks in its place do not
        notice writes.
        """
        others = ("_guard()", "run.checkpoint(")
        return writes(self._program) and (setting.recomputes or any(each in self._source for each in others))

    def _is_refused_by_uncounted(self, entry: Entry) -> bool:
        """Whether hooks that are called otherwise often with ebb, by right, were called too often without it."""
        return entry[0].endswith("error") and entry[1][0] == "Refused" and entry[1][1].split()[0] in self._uncounted

    def _is_refused_by_torch(self, entry: Entry) -> bool:
        """Whether torch's checkpoint has refused to hand out a save twice, which a region of ebb's inside of it does."""
        refused = entry[0].endswith("error") and entry[1][0] == "CheckpointError"
        return refused and "already unpacked once" in entry[1][1] and "run.checkpoint(" in self._source

    def _left(self, offloader: ebb.Offloader) -> str | None:
        """What a graph that is gone has left behind.

        LibTorch itself does not let go of every graph that was written to, or in which hooks keep what they are given.
        """
        if writes(self._program) or has_foreign_hooks(self._program):
            return None
        gc.collect()
        offloader.drain()
        left = offloader.stats().pool.now_bytes
        return f"{left} bytes left in the pool" if left else None

    def _expected(self, number: int) -> Iterator[Entry]:
        """What may be there: Note [What ebb is compared with]. Identity hooks do not notice writes, and ebb does."""
        for entries in (self._plain, self._identity or []):
            if number < len(entries):
                yield entries[number]
                if _is_write(entries[number]):
                    return

    def _judged(self, entry: Entry, expected: list[Entry]) -> str | None:
        if self._run(Plain()) != self._plain:
            self.tally.unsteady += 1
            return None
        return _difference(expected[0], entry) if expected else f"{entry[0]} is {entry[1]!r:.300}, and nothing plainly"

    def _run(self, run: Run, steps: int | None = None) -> list[Entry]:
        entries = execute(self._source, run, steps or self._program.steps, self._program.updates)
        return [(label, self._comparable(value)) for label, value in entries]

    def _comparable(self, value):
        if not isinstance(value, dict):
            return value
        return {name: calls for name, calls in value.items() if name.split(".")[0] not in self._uncounted}


def wrong(program: Program, setting: Setting) -> str | None:
    return Checker(program).wrong(setting)
