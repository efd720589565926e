"""Replaces functions of torch's."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

_MARK = "_ebb_wrapped"


def wrap_once(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Sets owner.name to make(owner.name), unless that has been done in this process."""
    function = getattr(owner, name)
    if not hasattr(function, _MARK):
        wrapped = functools.wraps(function)(make(function))
        setattr(wrapped, _MARK, True)
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(wrapped) if is_static else wrapped)
