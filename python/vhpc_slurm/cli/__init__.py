"""The `vhpc` command: what operators and users look at."""
