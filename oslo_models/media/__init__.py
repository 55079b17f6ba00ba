"""How a batch holds images, videos and sounds, and which of them belong to which row."""
