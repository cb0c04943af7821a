"""What servers are asked in measurements: datasets, sessions of coding agents, and what a load means."""
