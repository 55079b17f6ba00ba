"""Ranks that work together: the mesh and its groups, collectives, random streams, failure detection."""
