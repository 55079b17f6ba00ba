"""Pipeline parallelism: stages of a model, and the schedule that keeps them busy. Knows no architecture."""
