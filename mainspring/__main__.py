"""``python -m mainspring`` is the ``mainspring`` command."""

from __future__ import annotations

from mainspring.cli import main

if __name__ == "__main__":
    main()
