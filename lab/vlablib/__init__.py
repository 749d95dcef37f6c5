"""A whole Slurm cluster on one machine, made of namespaces and overlays."""
