"""What Slurm calls: the order of things and nothing else."""
