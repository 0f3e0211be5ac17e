"""One tree over many machines: two daemons, and what they say to each other."""
