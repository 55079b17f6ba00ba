"""How tensors are sharded over ranks: layouts and plans. Pure functions and data; no communication."""
