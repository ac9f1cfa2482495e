"""``python -m colossal_cli``: the program where its script is not on PATH."""

from __future__ import annotations

from colossal_cli.main import main

main()
