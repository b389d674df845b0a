"""What a user is told when compiling fails for reasons outside of the graph.

Source: none.
"""

from __future__ import annotations

from ..state.errors import ConfigError

__all__ = ["compiler_error", "folder_error"]


def folder_error(error: BaseException) -> ConfigError:
    """Say that the folder of compiled code cannot be used."""
    return ConfigError(
        f"compiling: expected a folder for compiled code that can be written and read, got: {error}; delete the "
        "folder that the environment variable TORCHINDUCTOR_CACHE_DIR names, or name another",
        field="TORCHINDUCTOR_CACHE_DIR",
        expected="a writable folder",
        got=str(error),
    )


def compiler_error() -> ConfigError:
    """Say that there is no compiler that takes what is generated; what it was asked about itself is kept, too."""
    return ConfigError(
        "compiling: expected a C++ compiler, found none that works; install g++, or name one in the environment "
        "variable CXX; if there is one, delete the folder that TORCHINDUCTOR_CACHE_DIR names",
        field="compiler",
        expected="g++",
    )
