"""Ports for processes that are about to be started: those of the benchmarks."""

from benchmarks.free_port import free_port as free_port
