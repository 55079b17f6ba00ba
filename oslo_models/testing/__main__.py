"""``python -m oslo_models.testing``: does this library work with the installed torch and transformers?"""

from __future__ import annotations

import argparse
import platform
import sys
import time

import torch
import transformers

from oslo_models._version import __version__
from oslo_models.testing.features import FEATURES
from oslo_models.testing.running import run_feature


def main() -> int:
    """Run the self-test, and print a verdict for each feature.

    Returns:
        The exit code: 1 if a feature failed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m oslo_models.testing",
        description="Compare tiny models of random weights with plain transformers, on CPUs and without network. "
        "Takes up to two minutes.",
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="run the features with this text in their names")
    chosen = [feature for feature in FEATURES if parser.parse_args().only in feature.name]
    if not chosen:
        parser.error(f"--only matches none of: {', '.join(feature.name for feature in FEATURES)}")
    print(
        f"oslo_models {__version__}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    failed = 0
    for feature in chosen:
        began = time.monotonic()
        verdict = run_feature(feature)
        failed += verdict.startswith("failed")
        print(f"{feature.name:<44} {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{failed} of {len(chosen)} features failed" if failed else "no feature failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
