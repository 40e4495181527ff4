"""A package that brings a selector, a benchmark, a model, a decoder and a table of its own."""
