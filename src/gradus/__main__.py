"""`python -m gradus` is `gradus`."""

from __future__ import annotations

import sys

from gradus.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
