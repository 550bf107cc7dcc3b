"""`python -m hf_symqk`: the `symqk` command."""

import sys

from .cli import main


if __name__ == "__main__":
    sys.exit(main())
