"""Makes the decisions of a decode step, in plain Python and torch, without SGLang."""
