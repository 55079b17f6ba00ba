"""Tests for users: `assert_same_as_one_process`, and a self-test that ``python -m oslo_models.testing`` runs."""

from oslo_models.testing.comparison import assert_same_as_one_process

__all__ = ["assert_same_as_one_process"]
