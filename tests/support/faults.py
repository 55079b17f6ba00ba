"""The fault harness of the benchmarks: faults of a deployed model, and training scripts that lose a rank."""

from __future__ import annotations

from benchmarks.faults import FAULTS, Stand, gone, strike
from benchmarks.faulty import CONFIG
from benchmarks.training_faults import Training, end_of, one_fault

__all__ = ["CONFIG", "FAULTS", "Stand", "Training", "end_of", "gone", "one_fault", "strike"]
