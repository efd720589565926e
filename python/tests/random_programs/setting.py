"""How a program is offloaded."""

import dataclasses
import random
from typing import Any

import ebb

PLANNED = ("least_memory", "slowdown", "device_budget")
UNPLANNED = ("offload_everything", "recompute(MEMORY_BOUND)", "recompute(COMPUTE_BOUND)", "anything")


@dataclasses.dataclass(frozen=True)
class Setting:
    kind: str
    seed: int = 0
    home: str = "host"
    stash_bytes: int | None = None

    @property
    def recomputes(self) -> bool:
        return self.kind != "offload_everything"

    @property
    def is_planned(self) -> bool:
        return self.kind in PLANNED

    def __str__(self) -> str:
        return f"{self.kind}, seed {self.seed}, home {self.home}, stash {self.stash_bytes} B"


def random_settings(number: int, seed: int) -> list[Setting]:
    """Every policy, and one kind of plan: an offloader that plans takes its time to measure the link."""
    rng = random.Random(f"settings {seed} {number}")
    stash = rng.choice([None, 1, 256, 4096])
    unplanned = [
        Setting(kind, rng.randrange(1000), "disk" if rng.random() < 0.2 else "host", stash) for kind in UNPLANNED
    ]
    return [*unplanned, Setting(rng.choice(PLANNED), rng.randrange(1000), rng.choice(["disk", "host"]))]


def _anything(seed: int) -> ebb.Policy:
    """Keeps, moves or computes again, as it comes."""

    def decide(candidate: ebb.Candidate) -> ebb.Decision:
        rng = random.Random(f"{seed} {candidate.ordinal}")
        if candidate.recompute != ebb.Recompute.NO and rng.random() < 0.6:
            return ebb.Decision.RECOMPUTE
        return ebb.Decision.OFFLOAD if rng.random() < 0.6 else ebb.Decision.KEEP

    return ebb.policies.callback(decide, ebb.policies.recompute(ebb.Recompute.COMPUTE_BOUND))


def make_offloader(setting: Setting) -> ebb.Offloader:
    rng = random.Random(setting.seed)
    planned: dict[str, Any] = {"planned_minimum_bytes": 1, "device_budget_is_a_wish": True}
    moved: dict[str, Any] = {"stash_bytes": setting.stash_bytes}
    policies = ebb.policies
    options: dict[str, Any] = {
        "offload_everything": lambda: moved | {"policy": policies.offload_everything()},
        "recompute(MEMORY_BOUND)": lambda: moved | {"policy": policies.recompute()},
        "recompute(COMPUTE_BOUND)": lambda: moved | {"policy": policies.recompute(ebb.Recompute.COMPUTE_BOUND)},
        "anything": lambda: moved | {"policy": _anything(setting.seed)},
        "least_memory": lambda: planned | {"least_memory": True},
        "slowdown": lambda: planned | {"slowdown": rng.choice([0.02, 0.5, 2.0])},
        "device_budget": lambda: planned | {"device_budget": 1 + rng.randrange(1 << rng.randrange(6, 15))},
    }[setting.kind]()
    return ebb.Offloader("cpu", home=setting.home, host_memory_warning=1, **options)
