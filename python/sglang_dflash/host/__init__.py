"""The boundary: the only folder that imports sglang (release pinned in `version.py`). "The host" is SGLang."""
