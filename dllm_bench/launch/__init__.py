"""Starting runs: in worker processes of this machine, and as jobs of a SLURM cluster."""
