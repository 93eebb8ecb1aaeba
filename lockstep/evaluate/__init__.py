"""`lockstep evaluate`: weights of any kind on data of any kind, on any number of ranks."""
