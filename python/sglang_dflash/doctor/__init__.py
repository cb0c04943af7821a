"""Says why a draft is rejected, or why a server is not faster: `sglang-dflash doctor`."""
