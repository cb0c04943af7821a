"""Behind make_offline_bundle.py: what a machine without a network needs to run this package."""
