"""Keep N replicas on their devices, and lay a program out on them."""
