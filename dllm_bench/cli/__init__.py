"""The command line: argument parsing, Hydra composition, one module per command."""
