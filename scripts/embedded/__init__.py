"""How the embedded models are made: `python -m scripts.embedded MODEL`."""
