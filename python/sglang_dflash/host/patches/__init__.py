"""What we mend in SGLang."""
