"""The lm-eval tasks: a yaml file each, with the items, prompts and graders they name."""
