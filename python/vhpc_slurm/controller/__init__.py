"""vhpcd: leases of generations, and how hooks ask for them."""
