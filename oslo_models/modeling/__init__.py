"""`ParallelModel`: everything a zoo class has beside its transformers class."""
