"""tensor_parallel's API: tensor parallelism in one process, with a thread for each rank."""
