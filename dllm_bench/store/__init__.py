"""What identifies a run, and the files that it stores."""
