"""What we add: the DFLASH worker, box by box."""
