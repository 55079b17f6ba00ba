"""Distributed execution: the device mesh and its groups, collectives, random streams, failure detection."""
