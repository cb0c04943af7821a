"""The boundary: the only folder that imports sglang (pinned in `version.py`)."""
