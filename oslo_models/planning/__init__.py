"""Plans a job before it runs: memory of each rank, sizes that fit, groups and collectives, and a certificate."""
