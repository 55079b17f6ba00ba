"""Plans a job without running it: memory of each rank, sizes that fit, groups and collectives, a certificate."""
