"""Replays the table of planted faults: `python -m tests.faults --help`."""

import sys

from tests.benchmarks.faults import main

sys.exit(main())
