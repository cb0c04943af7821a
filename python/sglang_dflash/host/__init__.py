"""The boundary: the only folder of the package that imports SGLang (release pinned in `start/version.py`).

`start` refuses, `worker` adds, `patches` mends.
"""
