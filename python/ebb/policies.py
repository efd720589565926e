"""Policies: what leaves the device. Each has one reason to keep a storage, and asks its `inner` about the rest.

    policies.minimum_size("1MiB", policies.except_operations(["SiluBackward0"]))
    policies.minimum_size("1MiB", lambda candidate: candidate.ordinal < 40)

Where a policy is wanted, a function will do: it gets an ebb.Candidate for each new storage, and returns True (offload),
False (keep) or an ebb.Decision. It runs inside the forward pass, and must be quick and do nothing that autograd would
save under the same offloader's guard, which is a RuntimeError. What it raises reaches the forward pass as it is. A
policy that has a state belongs to one Offloader. An offloader that is reachable from its own function is never freed.
"""

from collections.abc import Callable, Iterable

from ebb import _core
from ebb._sizes import Size, to_bytes

PolicyFunction = Callable[[_core.Candidate], bool | _core.Decision]
PolicyLike = _core.Policy | PolicyFunction

__all__ = [
    "callback",
    "except_operations",
    "keep_everything",
    "minimum_size",
    "offload_everything",
    "only_operations",
    "recompute",
]


def as_policy(policy: PolicyLike | None) -> _core.Policy:
    """The policy itself, one that asks the function, or offload_everything() for None."""
    if policy is None:
        return _core.offload_everything()
    if isinstance(policy, _core.Policy):
        return policy
    if any(policy is maker for maker in _MAKERS):
        raise TypeError(f"ebb: policies.{policy.__name__} makes a policy: call it, as policies.{policy.__name__}()")
    if callable(policy):
        return _core.python_policy(policy, _core.offload_everything())
    raise TypeError(f"ebb: a policy is {policy!r}, and must be one of ebb.policies or a function of a Candidate")


def offload_everything() -> _core.Policy:
    """Offloads every storage, however small."""
    return _core.offload_everything()


def keep_everything(least_bytes: Size = 1 << 20) -> _core.Policy:
    """Keeps every storage: what then moves is what is evicted when the device has no memory left.

    Storages of fewer than `least_bytes` are not evicted either.
    """
    return _core.keep_everything(to_bytes("least_bytes", least_bytes))


def minimum_size(bytes: Size = 1 << 20, inner: PolicyLike | None = None) -> _core.Policy:
    """Keeps storages of fewer than `bytes`, without asking `inner`. Raises ValueError for more than 2^56."""
    return _core.minimum_size(to_bytes("bytes", bytes), as_policy(inner))


def _names(names: Iterable[str]) -> set[str]:
    if isinstance(names, str):
        raise TypeError(f"ebb: the operations are {names!r}, and must be a list of names")
    return set(names)


def only_operations(names: Iterable[str], inner: PolicyLike | None = None) -> _core.Policy:
    """Keeps what none of these operations made, by the name of the autograd node ("SiluBackward0")."""
    return _core.only_operations(_names(names), as_policy(inner))


def except_operations(names: Iterable[str], inner: PolicyLike | None = None) -> _core.Policy:
    """Keeps what one of these operations made, by the name of the autograd node ("SiluBackward0")."""
    return _core.except_operations(_names(names), as_policy(inner))


def recompute(
    dearest: _core.Recompute = _core.Recompute.MEMORY_BOUND, inner: PolicyLike | None = None
) -> _core.Policy:
    """Drops what can be computed again at the cost of `dearest` or less; `inner` decides about the rest.

    Weights must not be written to between two backward passes over one graph: what is computed again uses them.
    """
    if not isinstance(dearest, _core.Recompute):
        raise TypeError(f"ebb: dearest is {dearest!r}, and must be an ebb.Recompute")
    return _core.recompute(dearest, as_policy(inner))


def callback(function: PolicyFunction, inner: PolicyLike | None = None) -> _core.Policy:
    """What `function` wants offloaded goes to `inner`."""
    if not callable(function):
        raise TypeError(f"ebb: callback() got {function!r}, and needs a function of a Candidate")
    return _core.python_policy(function, as_policy(inner))


_MAKERS = (
    callback,
    except_operations,
    keep_everything,
    minimum_size,
    offload_everything,
    only_operations,
    recompute,
)
