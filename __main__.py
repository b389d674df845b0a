"""``python -m purestep``: the command line."""

from __future__ import annotations

from .serving.cli import main

if __name__ == "__main__":
    main()
