"""`python -m fastformer` is the command `fastformer`."""

import sys

from fastformer_command import main

if __name__ == "__main__":
    sys.exit(main())
