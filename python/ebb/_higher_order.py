"""Lets torch's higher-order operators (cond, map, scan, a vmap over a Function) take managed tensors."""

import torch
import torch._ops

_KEY = torch._C._parse_dispatch_key("TESTING_ONLY_GenericMode")  # Note [How operations are observed]


def let_higher_order_operators_pass() -> None:
    """Has these operators look past the key of managed tensors, as operators of torch's library do by ebb's fallback. The
    operations inside of them find the bytes. Once for the process; operators that are made later have it, too."""
    passed = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    if _KEY in passed:
        return
    passed.append(_KEY)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(_KEY)
