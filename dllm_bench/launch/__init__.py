"""Starting runs: worker processes on this machine, and jobs on a SLURM cluster."""
