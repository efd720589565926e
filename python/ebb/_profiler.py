"""Lets profilers run over managed tensors: they read addresses, and let no error out."""

from collections.abc import Callable

import torch.autograd.profiler

from ebb import _core
from ebb._wrap_once import wrap_once


def wrap_profiler() -> None:
    """Wraps what torch's profilers call when they start and stop. Once for the process."""

    def make(tell: Callable[[bool], None]) -> Callable[[bool], None]:
        def _set_is_profiler_enabled(enable: bool) -> None:
            _core.let_addresses_be_read(enable)
            tell(enable)

        return _set_is_profiler_enabled

    wrap_once(torch.autograd.profiler, "_set_is_profiler_enabled", make)
