"""Makes the offline bundle: `python3.12 -m tools.offline`. Its installer and `complete.py` travel in the bundle."""
