"""Tiny configs; they are public, so that tests of other engines can use them too."""

from __future__ import annotations

from purestep.step.tiny_configs import configs as configs
from purestep.step.tiny_configs import tiny_config as tiny_config

__all__ = ["configs", "tiny_config"]
