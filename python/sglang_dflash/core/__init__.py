"""Decides: plain Python and torch, knows no SGLang."""
