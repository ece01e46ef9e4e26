"""`python -m lockstep` is `lockstep`."""

from __future__ import annotations

from lockstep.cli import entry

if __name__ == "__main__":
    entry()
