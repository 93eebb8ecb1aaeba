"""Full sharding by FSDP2: its units, the order of their gathers, and what stands around them."""
