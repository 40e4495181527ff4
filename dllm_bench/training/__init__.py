"""Training of parts that users add to a model: filters, drafters, step profiles, temperatures."""
