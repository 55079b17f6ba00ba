"""Sharding of tensors over ranks: layouts and plans. Pure functions and data, without communication."""
