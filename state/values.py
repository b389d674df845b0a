"""Frozen attrs classes that torch sees as pytrees.

``@value`` above ``@attrs.frozen(eq=False, kw_only=True)`` is the one way in which purestep declares a value class:
frozen, keyword only, compared by identity, and a registered torch pytree whose children are the fields in order.
Whatever is not a registered class (a tensor, a number, a pool handle) is one opaque leaf.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import attrs
from torch.utils import _pytree as pytree

__all__ = ["value"]

_T = TypeVar("_T", bound=attrs.AttrsInstance)


def value(cls: type[_T]) -> type[_T]:
    """Register a frozen attrs class as a torch pytree.

    Args:
        cls: the attrs class.
    Returns:
        The same class; ``attrs.evolve`` is the only way to a changed copy of an instance.
    """
    names = tuple(field.name for field in attrs.fields(cls))

    def flatten(obj: Any) -> tuple[list[Any], None]:
        return [getattr(obj, name) for name in names], None

    def flatten_with_keys(obj: Any) -> tuple[list[tuple[Any, Any]], None]:
        return [(pytree.GetAttrKey(name), getattr(obj, name)) for name in names], None

    def unflatten(children: Iterable[Any], _context: Any) -> Any:
        # A tree transform may put anything at a leaf (vmap puts axis numbers), so validators do not run here.
        obj = cls.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(obj, name, child)
        return obj

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    return cls
