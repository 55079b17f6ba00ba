"""How a batch holds images and videos, and which of them belong to which row."""
