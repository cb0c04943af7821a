"""What we refuse: flags, features, checkpoints and requests, before anything is loaded or computed."""
