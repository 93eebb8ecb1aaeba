"""The same bits on any layout: the order of additions, an exact norm, and what must be switched on."""
