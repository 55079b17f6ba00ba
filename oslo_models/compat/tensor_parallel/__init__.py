"""The front door of tensor_parallel: every rank is a thread of one process."""
