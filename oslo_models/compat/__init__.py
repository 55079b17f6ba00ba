"""The front doors of OSLO 2, parallelformers and tensor_parallel."""
