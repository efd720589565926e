"""Lets torch's higher-order operators (cond, map, scan, a vmap over a Function) take managed tensors."""

import torch._ops

from ebb._managed import KEY


def let_higher_order_operators_pass() -> None:
    """Has these operators look past the key of managed tensors, as operators of torch's library do by ebb's fallback. The
    operations inside of them find the bytes. Once for the process; operators that are made later have it, too."""
    passed = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    if KEY in passed:
        return
    passed.append(KEY)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(KEY)
