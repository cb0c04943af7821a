"""Tools of the maintainers: each folder is one, run from the repository's root as `python -m tools.NAME`."""
