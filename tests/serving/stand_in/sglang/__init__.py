"""Stands in for SGLang in the servers of test_lifetime.py."""
