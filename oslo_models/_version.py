"""The version of the distribution, and the tested versions; setup.py reads them without importing torch."""

__version__ = "0.1.0"

PYTHON = ("3.10", "3.13")
"""The first and the last tested version."""
TESTED = {"torch": ("2.11", "2.16"), "transformers": ("5.17", "5.25")}
"""For each library the first tested version, and the first later one that is not tested."""


def requirement(library: str) -> str:
    """Return the tested range as pip writes it: ``torch>=2.11,<2.16``."""
    first, untested = TESTED[library]
    return f"{library}>={first},<{untested}"
