"""Shape annotations: jaxtyping's where it is installed (the tests check them), else inert names.

Annotations are never evaluated in production, so the package runs without jaxtyping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:
        Bool = Float = Int = Any

__all__ = ["Bool", "Float", "Int"]
