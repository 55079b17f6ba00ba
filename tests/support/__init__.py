"""Shared parts of the tests: worker pool, models and batches, references, and programs that tests start."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the repository."""
