"""Measures the native ops and a decode step on a CPU: `python -m tools.measure.NAME`."""
