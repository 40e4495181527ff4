"""The generated benchmarks that ship with the package."""
