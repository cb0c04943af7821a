"""Fuzzes a server of the embedded pair: random requests, and extreme values in every field (scripts/fuzz.sh)."""
