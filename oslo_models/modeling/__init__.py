"""`ParallelModel`: the base that makes transformers classes parallel."""
