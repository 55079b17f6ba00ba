"""Version of the distribution, and tested versions. setup.py reads them without importing torch."""

__version__ = "0.1.0"

PYTHON = ("3.10", "3.13")
"""First and last tested version."""
TESTED = {"torch": ("2.11", "2.16"), "transformers": ("5.17", "5.25")}
"""For each library, the first tested version and the first later version without tests."""
OPTIONAL = {"peft": "0.21", "trl": "1.15"}
"""First version of optional libraries that works with sharded models.

Older peft trains other values silently. Older trl lacks names that our trainers import.
"""


def requirement(library: str) -> str:
    """Return the tested range in pip's syntax: ``torch>=2.11,<2.16``."""
    first, untested = TESTED[library]
    return f"{library}>={first},<{untested}"
