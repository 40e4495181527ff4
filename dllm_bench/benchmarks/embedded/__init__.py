"""Items and training texts of the tasks that ship with the package."""
