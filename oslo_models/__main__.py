"""``python -m oslo_models`` is the command ``oslo-models``."""

import sys

from oslo_models.cli.main import main

sys.exit(main())
