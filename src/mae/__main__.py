"""`python -m mae` is the command `mae`."""

import sys

from mae.cli import main

sys.exit(main())
