"""Lets profilers run over managed tensors: they read addresses, and let no error out."""

import functools

import torch.autograd.profiler

from ebb import _core

_MARK = "_ebb_wrapped"


def wrap_profiler() -> None:
    """Wraps what torch's profilers call when they start and stop. Once for the process."""
    profiler = torch.autograd.profiler
    tell = profiler._set_is_profiler_enabled
    if hasattr(tell, _MARK):
        return

    @functools.wraps(tell)
    def _set_is_profiler_enabled(enable: bool) -> None:
        _core.let_addresses_be_read(enable)
        tell(enable)

    setattr(_set_is_profiler_enabled, _MARK, True)
    profiler._set_is_profiler_enabled = _set_is_profiler_enabled
